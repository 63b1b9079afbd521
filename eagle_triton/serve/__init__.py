"""`eagle-triton serve`: a server with OpenAI's endpoints over one engine.

`main.py` reads the command line and starts everything. `app.py` has the endpoints. `bodies.py` declares the fields of
their bodies for pydantic, with `messages.py`, `tools.py` and `response_format.py`; `fields.py` has the way to declare a
field, and turns pydantic's errors into OpenAI's. `prompts.py` turns a body into tokens. `engine_client.py` hands them
to the engine, which runs in `engine_process.py`. `answers.py` writes the answer; `answer_parts.py` finds reasoning and
tool calls in it. `responses.py` adds /v1/responses, with `response_bodies.py`. `description.py` has the API's own
pages, `metrics.py` the counts for Prometheus, and `page.html` is the page at `/`. `other_engines.py` starts vLLM's or
SGLang's server instead.
"""
