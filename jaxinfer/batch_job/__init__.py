"""Resumable jobs: requests from a file of JSON lines, results to another."""

from jaxinfer.batch_job.job import Summary, check_job, run_batch

__all__ = ["Summary", "check_job", "run_batch"]
