"""vLLM for CPUs, in its own environment."""

from __future__ import annotations

import os

from driver import Driver, Reply, Request, serve

GIB = 1 << 30


class VLLM(Driver):
    def load(self, request: Request) -> Reply:
        # One process, so that its processor time is ours to read and threads stay where they are.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-request["kv_bytes"] // GIB))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["HF_HUB_OFFLINE"] = "1"
        from vllm import LLM

        self.llm = LLM(
            model=request["model"],
            dtype=request["dtype"],
            max_model_len=request["max_len"],
            max_num_seqs=request["max_seqs"],
            enable_prefix_caching=True,
            block_size=32,
            disable_log_stats=False,  # Else nobody tells when the first token came.
            seed=0,
        )
        return {"note": "prefix caching, blocks of 32, compiled by its defaults"}

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: blocks are held")

    def run(self, request: Request) -> Reply:
        prompts = [{"prompt_token_ids": tokens} for tokens in request["prompts"]]
        if request["kind"] == "beam":
            return self.beams(prompts, request)
        from vllm import SamplingParams

        sample = request["kind"] == "sample"
        params = SamplingParams(
            n=request["width"] if sample else 1,
            temperature=1.0 if sample else 0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=True,  # as ours does
        )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        metrics = [output.metrics for output in outputs]
        return {
            "tokens": [[list(each.token_ids) for each in output.outputs] for output in outputs],
            "first_s": [getattr(each, "first_token_latency", None) for each in metrics],
            "cached_tokens": [output.num_cached_tokens for output in outputs],
        }

    def beams(self, prompts: list[dict[str, list[int]]], request: Request) -> Reply:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(
            beam_width=request["width"], max_tokens=request["max_tokens"], ignore_eos=True
        )
        outputs = self.llm.beam_search(prompts, params)
        tokens = [
            [list(beam.tokens[len(prompt["prompt_token_ids"]) :]) for beam in output.sequences]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return {"tokens": tokens}


if __name__ == "__main__":
    serve(VLLM)
