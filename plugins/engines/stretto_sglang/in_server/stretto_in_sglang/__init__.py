"""Models of stretto in an SGLang server (SGLANG_EXTERNAL_MODEL_PACKAGE): this package imports nothing of
stretto."""
