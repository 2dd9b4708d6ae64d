"""Which SGLang fits which FlashInfer, found by patching every pair, and told as tables.

    registry --releases--> versions --store--> few files of each --gather--> Facts --tables--> page

`pair.py` is one pair; `runner.py` does many at once and remembers them.
"""
