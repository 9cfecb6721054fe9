"""Inference engines that are HTTP servers, such as SGLang and vLLM.

Public: for authors of inference engines.
"""
