"""Stretto's models in an SGLang server (SGLANG_EXTERNAL_MODEL_PACKAGE); imports nothing of stretto."""
