plimsoll: terminated: passed on to 2 ranks
