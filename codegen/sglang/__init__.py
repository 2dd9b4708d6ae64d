"""SGLang's side: read `flashinfer_mla_backend.py`, find each place that an edit goes."""
