"""`eagle-triton serve`: a server with OpenAI's endpoints over one engine.

`main.py` reads the command line and runs it. `fields.py` has the table of what a request may say; `bodies.py` reads it,
with `messages.py` and `tools.py`, and `prompts.py` makes tokens of it. `app.py` has the endpoints. `answers.py` writes
what is answered, `answer_parts.py` finds reasoning and calls in it. `responses.py` is /v1/responses over both,
`description.py` the API's own pages. `engine_thread.py` is the one thread that touches the model, `metrics.py` counts.
`page.html` is the page at `/`. `other_engines.py` hands all of it over to vLLM's or SGLang's server.
"""
