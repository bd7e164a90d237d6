package main

import (
	"sync"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/launch"
)

// trainerCores returns the function with which launch and service find the trainer's share. Where there is no split,
// and where both roles use all cores in turns, it is the standard share.
func (p hostProfile) trainerCores(standard binding.TrainerShare) launch.TrainerCores {
	return func(h *host.Host, ranks int) (binding.TrainerShare, string, bool) {
		split, note := p.split(h, ranks, "", "")
		if split == nil {
			return standard, "no host profile is used: trainer and optimizer take turns on all cores of a rank", false
		}
		return split.TrainerCores(standard), note, true
	}
}

// onceForRanks returns the trainer's share for the service, which asks for each session. Users read of a profile once.
func onceForRanks(p hostProfile) func(*host.Host, int) binding.TrainerShare {
	find, found := p.trainerCores(binding.TrainerShare{}), map[int]binding.TrainerShare{}
	var lock sync.Mutex
	return func(h *host.Host, ranks int) binding.TrainerShare {
		lock.Lock()
		defer lock.Unlock()
		share, known := found[ranks]
		if !known {
			var why string
			var noted bool
			if share, why, noted = find(h, ranks); noted {
				p.logf("%s", why)
			}
			found[ranks] = share
		}
		return share
	}
}
