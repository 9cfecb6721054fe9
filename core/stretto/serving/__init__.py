"""What inference engines share: the intake of requests, stop strings, and the frame of engines that are HTTP
servers, such as SGLang and vLLM.

Public: for authors of inference engines.
"""
