package explain

import (
	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
)

// identified returns an error of PyTorch with figures that can be right, and with the failed process apart from the
// others. NVIDIA's library names processes by their number on the host. In a container PyTorch has another number, and
// lists its own process as one of the others.
func identified(f evidence.GPUOutOfMemory) evidence.GPUOutOfMemory {
	if f.Self.Bytes < f.Reserved.Bytes-rounding || f.Total.Known && f.Self.Bytes > f.Total.Bytes {
		f.Self = evidence.Size{} // the driver does not tell: 0 in some containers, all bits set under Windows
	}
	listed := f.Others
	f.Others = nil
	own := ownProcess(f, listed)
	for i, p := range listed {
		switch {
		case i == own:
			f.Self = p.Used
		default:
			p.Used.Known = p.Used.Bytes > 0
			f.Others = append(f.Others, p)
		}
	}
	return f
}

// rounding is what a sum of PyTorch's figures may be off by. They have two decimals.
const rounding = ledger.GiB / 50

// ownProcess returns the index of the failed process in the list, or -1 if it is not there. It is there if the card
// cannot hold both all that the list says and what the failed process has reserved. The failed process holds at least
// what it has reserved, and of several such processes it is taken to be the smallest.
func ownProcess(f evidence.GPUOutOfMemory, listed []evidence.GPUProcess) int {
	if f.Self.Known || !f.Reserved.Known || !f.Total.Known || !f.Free.Known {
		return -1
	}
	own, sum := -1, ledger.Bytes(0)
	for i, p := range listed {
		sum += p.Used.Bytes
		if p.Used.Bytes >= f.Reserved.Bytes-rounding && (own < 0 || p.Used.Bytes < listed[own].Used.Bytes) {
			own = i
		}
	}
	if sum+f.Reserved.Bytes <= f.Total.Bytes-f.Free.Bytes+rounding {
		return -1
	}
	return own
}

// others is what other processes held, as far as the error lists them.
func others(f evidence.GPUOutOfMemory) ledger.Bytes {
	var sum ledger.Bytes
	for _, p := range f.Others {
		if p.Used.Known {
			sum += p.Used.Bytes
		}
	}
	return sum
}

// unlisted is what was in use and is neither PyTorch's nor of a process that the error lists, or 0 if unknown.
func unlisted(f evidence.GPUOutOfMemory) ledger.Bytes {
	if !f.Total.Known || !f.Free.Known || !f.Reserved.Known {
		return 0
	}
	return max(f.Total.Bytes-f.Free.Bytes-max(f.Self.Bytes, f.Reserved.Bytes)-others(f), 0)
}

// besideOthers holds if the request would have been met without the other processes.
func besideOthers(_ *scene, f evidence.GPUOutOfMemory) bool { return decides(f, others(f)) }

// besideUnlisted holds if the request would have been met without what the error does not list. An error that does not
// say what its own process held leaves room for its context and its libraries.
func besideUnlisted(_ *scene, f evidence.GPUOutOfMemory) bool {
	return unlisted(f) > f.Total.Bytes/4 && unlisted(f) > 2*ledger.GiB && decides(f, unlisted(f))
}

// decides reports whether a holder of bytes beside PyTorch is the cause: it has a share of the card, the request would
// have been met without it, and it is larger than what PyTorch itself held back.
func decides(f evidence.GPUOutOfMemory, held ledger.Bytes) bool {
	return held > f.Total.Bytes/10 && held >= missing(f) && held > slack(f) && !enoughFree(nil, f)
}
