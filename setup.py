from setuptools import setup

setup()  # pyproject.toml says everything
