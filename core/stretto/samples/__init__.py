"""The sample writer of a run: a process that follows the log and writes the kept samples to Parquet files."""
