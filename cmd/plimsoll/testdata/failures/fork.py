"""Starts processes until it cannot start another."""

import os
import time


def main() -> None:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)


if __name__ == "__main__":
    main()
