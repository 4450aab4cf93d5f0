"""OpenAI's API, with vLLM's additions, over the engine.

fields        what chat and plain completions have in common
sampling      fields to SamplingParams or BeamSearchParams
messages      chat messages to what templates take
tools         tools, and calls of them in a model's text
jobs          requests made, followed, and cancelled if the client leaves
chunks        server-sent events, made without building objects
logprobs      log-probabilities in OpenAI's shapes
usage         tokens counted
chat          POST /v1/chat/completions
completions   POST /v1/completions
models        GET /v1/models
tokens        POST /tokenize, /detokenize
"""
