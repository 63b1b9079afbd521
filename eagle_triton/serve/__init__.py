"""`eagle-triton serve`: a server with OpenAI's endpoints over one engine.

`main.py` reads the command line and runs it. `bodies.py` says what a request may say, `app.py` has the endpoints,
`answers.py` writes what is answered. `engine_thread.py` is the one thread that touches the model, `metrics.py` counts.
`page.html` is the page at `/`. `other_engines.py` hands all of it over to vLLM's or SGLang's server.
"""
