"""llama.cpp through llama-cpp-python's low-level functions, in its own environment.

All sequences are decoded in one batch a step, and what all prompts share is computed once and
shared by `llama_memory_seq_cp`: llama.cpp's own means for this. It has no tree: what stays between
two runs is one prefix, in a sequence that nobody continues.
"""

from __future__ import annotations

from typing import Any

from driver import Clock, Driver, Reply, Request, common_length, serve

PREFIX = 0  # the sequence that keeps the prefix; the prompts' are 1, 2, ...
BATCH = 2048


class LlamaCpp(Driver):
    def load(self, request: Request) -> Reply:
        import llama_cpp as llama

        self.api = llama
        llama.llama_backend_init()
        settings = llama.llama_model_default_params()
        # With its AMX buffers the version tried crashed while loading.
        settings.use_extra_bufts = False
        self.model = llama.llama_model_load_from_file(request["model"].encode(), settings)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {request['model']}")
        context = llama.llama_context_default_params()
        # It writes zeros to all of its KV memory at once, so no more than can be needed.
        fits = request["kv_bytes"] // self.bytes_per_token(request["dtype"])
        context.n_ctx = min(fits, request["max_len"] * (request["max_seqs"] + 1))
        context.n_batch = context.n_ubatch = BATCH
        context.n_seq_max = request["max_seqs"] + 1
        context.n_threads = context.n_threads_batch = request["threads"]
        context.kv_unified = True  # One buffer for all sequences: only so do they share.
        if request["dtype"] == "float32":
            context.type_k = context.type_v = llama.GGML_TYPE_F32
        self.context = llama.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context: is there enough memory?")
        self.memory = llama.llama_get_memory(self.context)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        self.reset()
        kv = "float32" if request["dtype"] == "float32" else "float16"
        return {"note": f"no AMX buffers, KV in {kv}, prefix shared by sequence copy"}

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of a token, in all layers."""
        api, model = self.api, self.model
        width = api.llama_model_n_embd(model) // api.llama_model_n_head(model)
        values = 2 * api.llama_model_n_layer(model) * api.llama_model_n_head_kv(model) * width
        return values * (4 if dtype == "float32" else 2)

    def reset(self) -> None:
        self.api.llama_memory_clear(self.memory, True)
        self.prefix: list[int] = []

    def run(self, request: Request) -> Reply:
        if request["kind"] == "beam":
            raise RuntimeError("llama.cpp has no beam search any more")
        prompts = request["prompts"]
        width = request["width"] if request["kind"] == "sample" else 1
        clock = Clock(len(prompts))
        cached = self.keep_prefix(prompts)
        samplers = [self.sampler(request["kind"], i) for i in range(len(prompts) * width)]
        tokens: list[list[int]] = [[] for _ in samplers]
        try:
            self.prefill(prompts, width, samplers, tokens, clock)
            for _ in range(request["max_tokens"] - 1):
                self.step(prompts, width, samplers, tokens, clock)
        finally:
            for place, sampler in enumerate(samplers):
                self.api.llama_sampler_free(sampler)
                self.api.llama_memory_seq_rm(self.memory, 1 + place, -1, -1)
        return {
            "tokens": [tokens[i : i + width] for i in range(0, len(tokens), width)],
            "times": clock.times,
            "cached_tokens": [cached] * len(prompts),
        }

    def keep_prefix(self, prompts: list[list[int]]) -> int:
        """Have what all prompts share in the prefix's sequence; how much of it was there."""
        length = min(common_length(prompts), min(map(len, prompts)) - 1)
        wanted = prompts[0][:length]
        common = common_length([self.prefix, wanted])
        self.api.llama_memory_seq_rm(self.memory, PREFIX, common, -1)
        self.decode([(token, common + i, PREFIX, False) for i, token in enumerate(wanted[common:])])
        self.prefix = wanted
        return common

    def sampler(self, kind: str, seed: int) -> Any:
        api = self.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if kind == "greedy":
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        else:
            api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed))
        return chain

    def prefill(
        self,
        prompts: list[list[int]],
        width: int,
        samplers: list[Any],
        tokens: list[list[int]],
        clock: Clock,
    ) -> None:
        """Compute each prompt's own tokens, copy them to its other samples, take first tokens."""
        for number, prompt in enumerate(prompts):
            first = number * width
            shared = len(self.prefix)
            self.api.llama_memory_seq_cp(self.memory, PREFIX, 1 + first, -1, -1)
            rest = prompt[shared:]
            last = len(rest) - 1
            rows = self.decode([(t, shared + i, 1 + first, i == last) for i, t in enumerate(rest)])
            for place in range(first, first + width):
                if place > first:
                    self.api.llama_memory_seq_cp(self.memory, 1 + first, 1 + place, -1, -1)
                self.take(rows[-1], samplers[place], tokens[place])
            clock.note(number)

    def step(
        self,
        prompts: list[list[int]],
        width: int,
        samplers: list[Any],
        tokens: list[list[int]],
        clock: Clock,
    ) -> None:
        """A token for every sequence."""
        items = [
            (own[-1], len(prompts[place // width]) + len(own) - 1, 1 + place, True)
            for place, own in enumerate(tokens)
        ]
        for place, row in enumerate(self.decode(items)):
            self.take(row, samplers[place], tokens[place])
        clock.note_all()

    def take(self, row: int, sampler: Any, tokens: list[int]) -> None:
        tokens.append(self.api.llama_sampler_sample(sampler, self.context, row))

    def decode(self, items: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, wants logits); the rows that have logits.

        Rows are of the last call to llama.cpp, so who wants logits must fit into one.
        """
        rows: list[int] = []
        for start in range(0, len(items), BATCH):
            part = items[start : start + BATCH]
            batch = self.batch
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wants) in enumerate(part):
                batch.token[i] = token
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = wants
            status = self.api.llama_decode(self.context, batch)
            if status:
                raise RuntimeError(f"llama_decode failed with {status}")
            rows = [i for i, item in enumerate(part) if item[3]]
        return rows


if __name__ == "__main__":
    serve(LlamaCpp)
