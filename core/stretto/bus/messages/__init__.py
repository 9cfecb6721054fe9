"""Every message between the processes of a run, one file for each conversation.

A message is a msgpack array: its tag, `Name/version`, then its fields in order. A change may append a field
with a default. Any other change raises the version; readers refuse versions that they do not know.
"""
