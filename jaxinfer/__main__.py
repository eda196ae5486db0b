"""`python -m jaxinfer` is the command `jaxinfer`."""

from jaxinfer.cli.main import run

if __name__ == "__main__":
    run()
