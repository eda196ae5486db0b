"""Resumable batch jobs: read requests from one file of JSON lines, append results to another."""

from jaxinfer.batch_job.input import wrong_lines
from jaxinfer.batch_job.job import Summary, check_job, run_batch, shard_path
from jaxinfer.batch_job.line_form import LineForm
from jaxinfer.batch_job.merge import Merged, merge_shards

__all__ = ["LineForm", "Merged", "Summary", "check_job", "merge_shards", "run_batch", "shard_path", "wrong_lines"]
