"""The interface of vLLM's `LLM`, for scripts that were written for it: `from jaxinfer.compat.vllm import LLM`.

A parameter has the meaning and default that it has in vLLM 0.18, or is refused by name. Its modules are where vLLM has
them. Tokens are drawn by this package, so the samples of a seed differ from vLLM's.
"""

from jaxinfer.compat.vllm.inputs import TextPrompt, TokensPrompt
from jaxinfer.compat.vllm.llm import LLM
from jaxinfer.compat.vllm.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from jaxinfer.compat.vllm.pooling_params import PoolingParams
from jaxinfer.compat.vllm.sampling_params import SamplingParams

__version__ = "0.18.0"  # of the interface

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]
