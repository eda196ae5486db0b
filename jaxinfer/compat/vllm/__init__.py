"""The interface of vLLM's `LLM`, for scripts that were written for it: `from jaxinfer.compat.vllm import LLM`.

A parameter has the meaning and default that it has in vLLM 0.18, or is refused by name. The modules `inputs`,
`lora.request`, `outputs`, `pooling_params`, `sampling_params` and `tokenizers` have the names of vLLM's. Tokens are
drawn by this package, so the samples of a seed differ from vLLM's.
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

NOT_HERE = {
    "AsyncEngineArgs": "jaxinfer.AsyncLLM takes the fields of EngineConfig",
    "AsyncLLMEngine": "jaxinfer.AsyncLLM serves an event loop",
    "BeamSearchParams": "LLM.native.beam_search takes num_beams and length_penalty",
    "EngineArgs": "LLM takes the same parameters",
    "LLMEngine": "jaxinfer.LLM has add and step",
    "PoolingOutput": "LLM.embed returns EmbeddingRequestOutput",
    "PoolingRequestOutput": "LLM.embed returns EmbeddingRequestOutput",
}


def __getattr__(name: str) -> object:
    if name in NOT_HERE:
        raise ImportError(f"jaxinfer.compat.vllm has no {name}: {NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
