"""Small helpers under everything else: cores, files, addresses, the version of the API."""
