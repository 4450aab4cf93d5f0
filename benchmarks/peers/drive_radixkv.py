"""radixkv, driven like the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver import Clock, Driver, Reply, Request, serve

if TYPE_CHECKING:
    from radixkv import BeamSearchParams, SamplingParams
    from radixkv.engine import TokenDelta  # imported only when the model loads


class RadixKV(Driver):
    def load(self, request: Request) -> Reply:
        import torch

        from radixkv import LLM  # isort: split  # First: see radixkv/__init__.py.

        torch.set_num_threads(request["threads"])
        self.llm = LLM(
            request["model"],
            dtype=request["dtype"],
            max_num_seqs=request["max_seqs"],
            max_model_len=request["max_len"],
            kv_memory=request["kv_bytes"],
        )
        backend = type(self.llm.engine.runner.backend).__name__
        return {"note": f"{backend}, blocks of {self.llm.cache.block_size}"}

    def reset(self) -> None:
        self.llm.cache.reset()

    def run(self, request: Request) -> Reply:
        clock = Clock(len(request["prompts"]))

        def note(delta: TokenDelta) -> None:
            if delta.index == 0:
                clock.note(int(delta.request_id))

        outputs = self.llm.generate(request["prompts"], self.params(request), on_token=note)
        if errors := [output.error for output in outputs if output.error is not None]:
            raise errors[0]
        return {
            "tokens": [[list(each.token_ids) for each in output.outputs] for output in outputs],
            "times": clock.times,
            "cached_tokens": [output.num_cached_tokens for output in outputs],
        }

    def params(self, request: Request) -> SamplingParams | BeamSearchParams:
        from radixkv import BeamSearchParams, SamplingParams

        length = {"max_tokens": request["max_tokens"], "ignore_eos": True}
        if request["kind"] == "beam":
            return BeamSearchParams(
                beam_width=request["width"], num_return_sequences=request["width"], **length
            )
        if request["kind"] == "sample":
            return SamplingParams(n=request["width"], seed=0, temperature=1, **length)
        return SamplingParams(temperature=0, **length)


if __name__ == "__main__":
    serve(RadixKV)
