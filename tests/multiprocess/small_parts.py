"""`jaxgpt.prepare`, in which even small files have a part of their own."""

from jaxgpt.data.prepare import parts
from jaxgpt.prepare import main

parts._PART = 1

if __name__ == "__main__":
    main()
