"""Reads what one FlashInfer expects of whoever plans its MLA attention, from its source."""
