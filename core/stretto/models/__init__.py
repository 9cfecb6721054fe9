"""A model's own files, its tokenizer and its prompts, read without torch.

Public: for authors of engines, datasets and weight transports.
"""
