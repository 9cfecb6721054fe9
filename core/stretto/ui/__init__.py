"""The page of `stretto ui`: a server that reads the folders of runs, and the files of the page. Private.

```
server.py      the server, and its answers as JSON
access.py      token, cookie, Host check, headers
runs.py        the runs below a folder
overview.py    what the first view of a run shows
curves.py      curves in a window, smoothed
lanes.py       the timeline in a window, as lanes of spans
samples.py     kept samples as JSON
token_text.py  the text of each token
static/        the page itself: plain JavaScript modules, and uPlot in static/vendor
```
"""
