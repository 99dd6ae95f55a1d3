"""Random programs for as long as you like: `make fuzz`, or

    python -m tests.campaigns.fuzz                    an hour, with the seed of today
    python -m tests.campaigns.fuzz --minutes 10
    python -m tests.campaigns.fuzz --mode jvp --seed 7 --cases 1    what a failure names

The modes (see `agreement`) take turns, by rounds of some seeds. The first failure ends it:
hypothesis makes the program small, and it is shown as a script, with the command that repeats it.
The exit status is 1.
"""

import argparse
import sys
import time
import warnings
from datetime import date

from tests.campaigns.agreement import NAMES, search

ROUND = 20  # seeds


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(f"{date.today():%Y%m%d}00000"))
    parser.add_argument("--mode", choices=NAMES, help="one of them only")
    parser.add_argument("--cases", type=int, help="no more than so many in each mode")
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    start = time.monotonic()
    print(f"The first seed: {options.seed}")
    for seed in range(options.seed, options.seed + (options.cases or 10**9), ROUND):
        for mode in [options.mode] if options.mode else NAMES:
            try:
                search(mode, seed, min(ROUND, options.cases or ROUND))
            except AssertionError as error:
                print(error)
                return 1
        minutes = (time.monotonic() - start) / 60
        print(f"{minutes:5.1f} of {options.minutes:g} minutes, seed {seed + ROUND}", flush=True)
        if minutes >= options.minutes:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
