"""Reads a mapped file that has been truncated: SIGBUS."""

import mmap
import sys


def main() -> None:
    with open(sys.argv[1], "w+b") as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        print("reading", flush=True)
        print(mapped[4096])


if __name__ == "__main__":
    main()
