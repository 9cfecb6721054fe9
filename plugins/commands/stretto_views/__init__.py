"""Commands that print a run, or several, or write them to a file.

```
commands.py        the commands with their options
runs.py            `stretto runs`: the runs below a folder
samples.py         `stretto samples`: kept samples
compare.py         `stretto compare`: tables of several runs
plot.py            `stretto plot`: curves in the terminal, or as a file
report.py          `stretto report`: one HTML file
report_samples.py  the samples in it
tables.py          tables in the terminal
```
"""
