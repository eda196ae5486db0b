"""Resumable batch jobs: read requests from one file of JSON lines, append results to another."""

from jaxinfer.batch_job.job import Summary, check_job, run_batch

__all__ = ["Summary", "check_job", "run_batch"]
