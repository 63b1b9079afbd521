"""The program `eagle-triton`: answers a prompt by one drafting method or several, and compares the methods.

`main.py` reads the first word of the command line. `chat.py` is the chat: `commands.py` interprets its lines,
`readers.py` reads them, `figures.py` prints an answer's figures. `generate.py` answers one prompt. `check.py` and
`environment.py` inspect the machine. `ablation.py` compares the methods. `settings.py` has the settings of an answer,
and `decoding.py` decodes it.
"""
