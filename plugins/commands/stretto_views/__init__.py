"""Commands that print one run, or several runs.

```
commands.py  the commands with their options
runs.py      `stretto runs`: the runs below a folder
samples.py   `stretto samples`: kept samples
compare.py   `stretto compare`: tables of several runs
plot.py      `stretto plot`: curves in the terminal
```
"""
