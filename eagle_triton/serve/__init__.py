"""`eagle-triton serve`: a server with OpenAI's endpoints over one engine.

`main.py` reads the command line and starts everything. `app.py` has the endpoints. A request comes in by `bodies.py`,
which declares its fields for pydantic, with `messages.py`, `tools.py` and `response_format.py`; `fields.py` says how
one is declared, and makes an error of OpenAI's form of what pydantic finds. `prompts.py` turns it into tokens, and
`engine_client.py` hands them to the engine, which runs in `engine_process.py`. `answers.py` writes the answer, in which
`answer_parts.py` finds reasoning and calls of tools. `responses.py` is /v1/responses over both, with
`response_bodies.py`. `description.py` has the API's own pages, `metrics.py` counts, `page.html` is the page at `/`.
`other_engines.py` starts vLLM's or SGLang's server instead.
"""
