package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
)

// save copies everything that the rank writes of a torch_dist checkpoint to the host, before the first file is begun
// (FileSystemWriterAsync.preload_tensors). The copies do not wait for the GPU, so PyTorch pins them. A synchronous save
// frees them at its end. An asynchronous one keeps them through steps, until another process has written them.
func (s *megatronRank) save(buffers []gradientBuffer) {
	var copies []tensor
	stage := func(bytes int64) {
		copies = append(copies, s.pinned.allocate(bytes, ledger.CheckpointCopies, s.whyCopies))
	}
	if s.Saving.Format != "torch_dist" {
		return
	}
	for _, b := range buffers {
		for _, p := range b.parameters {
			stage(ceilDivide(p.Elements*s.ParameterType.Size(), s.writers(p.Expert)))
		}
	}
	if !s.Saving.ModelOnly {
		fraction := 0.
		if s.CPUOffload {
			fraction = s.OffloadFraction
		}
		s.parts(buffers, fraction, func(elements int64, onHost bool) {
			for range savedStates {
				if !onHost { // those of the host are written from where they are
					stage(4 * s.writtenState(elements))
				}
			}
		})
	}
	for _, c := range copies {
		c.free()
	}
}

// savedStates are the master weight and both moments of a parameter, which a checkpoint has in fp32.
const savedStates = 3

// writers returns how many ranks have the same parameter, and share the work of writing it.
func (s *megatronRank) writers(expert bool) int64 {
	switch {
	case s.Saving.Undivided:
		return 1
	case expert:
		return max(1, s.Degrees.ExpertData)
	}
	return max(1, s.Degrees.Data*s.Degrees.Context)
}

// writtenState returns how much of a state a rank writes: its part, or its share of what all of them have.
func (s *megatronRank) writtenState(elements int64) int64 {
	if s.Distributed {
		return elements
	}
	return ceilDivide(elements, s.writers(false))
}

func (s *megatronRank) whyCopies() string {
	states := fmt.Sprintf("its part of master weights and moments in fp32, %d B a parameter, and ", 4*savedStates)
	if s.Saving.ModelOnly {
		states = ""
	}
	until := "until all of it is written"
	switch {
	case s.Saving.Async && s.Saving.Persistent:
		until = "by the process that writes it while steps go on"
	case s.Saving.Async:
		until = "while steps go on, until another process has written it"
	}
	return fmt.Sprintf("everything that the rank writes of a torch_dist checkpoint: %sits share of the parameters in "+
		"%v, staged at once %s (FileSystemWriterAsync.preload_tensors)", states, s.ParameterType, until)
}
