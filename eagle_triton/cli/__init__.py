"""The program `eagle-triton`: a prompt answered by one drafting method or several, and their ablation.

`main.py` reads the first word of the command line. `chat.py` is the chat: `commands.py` says what its lines mean,
`readers.py` where they come from, `figures.py` what an answer took. `generate.py` answers one prompt, `check.py` and
`environment.py` look at the machine, `ablation.py` compares the methods. `settings.py` says what an answer can be told,
`decoding.py` gives it.
"""
