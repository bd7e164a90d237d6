// Package simulation has tests that run the state engine's own code in a world that they control: a scheduler decides
// which call goes on, and disks, memory and connections fail as they may.
//
// A seed decides the schedule: what the trainer asks for, in which order calls go on, and which fault comes at which
// instant. A schedule that fails prints its seed, and the same seed is the same schedule again:
//
//	go test ./internal/state/simulation -run '^TestSchedules$' -seed 17 -v
//
// Nothing of the engine is modelled. A schedule opens shards, makes steps, is killed, attaches what the dead process
// has left, and compares the bits with a run that nothing has disturbed.
package simulation
