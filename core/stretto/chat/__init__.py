"""Chats as a model's template writes them: the form of its turns and tool calls, and prompts and rows in it.

Nothing here needs torch or a model's files.
"""
