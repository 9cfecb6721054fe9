"""Read a model's files, its tokenizer and its prompts without torch.

Public: for authors of engines, datasets and weight transports.
"""
