//go:build linux

package service

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/shard"
)

const maximumWindow = 1 << 40

// setWindow gives the session a window.
func (c *connection) setWindow(r request) (reply, error) {
	body, err := protocol.Decode[protocol.WindowBody](r.Kind, r.Body)
	if err != nil {
		return reply{}, err
	}
	if body.Bytes == 0 || body.Bytes > maximumWindow {
		return reply{}, protocol.Refused.Errorf("window of %d bytes: expected 1 to %d", body.Bytes,
			uint64(maximumWindow))
	}
	// The seal keeps it from shrinking, so accesses cannot end this process.
	if err := r.checkFile(int64(body.Bytes), unix.F_SEAL_SHRINK); err != nil {
		return reply{}, protocol.Refused.Errorf("window: %v", err)
	}
	return reply{}, c.session.contents.(*heldShard).setWindow(body.Bytes, r.files[0])
}

// setWindow maps the client's memfd.
func (s *heldShard) setWindow(size uint64, file *os.File) error {
	mapped, err := unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return protocol.Refused.Errorf("window: mmap of %d bytes: %v", size, err)
	}
	s.dropWindow()
	s.window = mapped
	return nil
}

func (s *heldShard) dropWindow() {
	if s.window != nil {
		_ = unix.Munmap(s.window) // cannot fail: the mapping is ours
		s.window = nil
	}
}

// transferArguments checks a transfer. It returns the range of the shard, and the numbers, which lie in the window.
func (s *heldShard) transferArguments(
	kind protocol.Kind, t protocol.TransferBody,
) (all shard.Range, numbers []float32, err error) {
	if t.Zero != 0 {
		return all, nil, protocol.Malformed.Errorf("%v: a field that must be 0 is %d", kind, t.Zero)
	}
	format := s.shard.Config().Format
	if t.What >= protocol.Streams || int(t.What) > format.Algorithm.Moments() {
		return all, nil, protocol.Refused.Errorf("%v: stream %d: %s has master weights (0) and %d moments", kind,
			t.What, s.document.Optimizer, format.Algorithm.Moments())
	}
	if all, err = s.rangeOf(kind, t.First, t.Count); err != nil {
		return all, nil, err
	}
	data, err := s.inWindow(kind, t.Offset, t.Count, 4)
	if err != nil {
		return all, nil, err
	}
	return all, unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(data))), t.Count), nil
}

// write copies numbers from the window into the state.
func (s *heldShard) write(t protocol.TransferBody) error {
	all, numbers, err := s.transferArguments(protocol.Write, t)
	if err != nil {
		return err
	}
	s.saveIsOver.Wait() // the checkpoint needs the state as it was
	s.header.beginWrite()
	if t.What != protocol.MasterWeights {
		s.shard.WriteMoment(int(t.What)-protocol.FirstMoment, all.First, numbers)
		return nil
	}
	format := s.shard.Config().Format
	s.shard.EachOf(all, within(all, func(c kernel.Chunk, from, end int, at int) {
		for i, w := range numbers[at : at+end-from] {
			c.PutMasterWeight(format, from+i, w)
		}
	}))
	return nil
}

// read copies numbers from the state into the window.
func (s *heldShard) read(t protocol.TransferBody) error {
	all, numbers, err := s.transferArguments(protocol.Read, t)
	if err != nil {
		return err
	}
	format := s.shard.Config().Format
	return s.shard.ViewOf(all, within(all, func(c kernel.Chunk, from, end int, at int) {
		for i := from; i < end; i++ {
			if t.What == protocol.MasterWeights {
				numbers[at+i-from] = c.MasterWeight(format, i)
			} else {
				numbers[at+i-from] = c.Moment(int(t.What)-protocol.FirstMoment, i)
			}
		}
	}))
}

// within returns a function of chunks that calls body for those with elements of a range. They are elements from to end
// of the chunk, and begin at position at of the range.
func within(all shard.Range, body func(c kernel.Chunk, from, end, at int)) func(shard.Chunk, kernel.Chunk) {
	return func(chunk shard.Chunk, c kernel.Chunk) {
		if own := chunk.Intersect(all); own.Count > 0 {
			body(c, int(own.First-chunk.First), int(own.End()-chunk.First), int(own.First-all.First))
		}
	}
}

// accumulate adds the numbers in the window to the gradients. It does so once for each
// request number, even if the client repeats the request.
func (s *heldShard) accumulate(b protocol.AccumulateBody) error {
	if int(b.Type) >= len(protocol.NumberTypes) || b.Zero != 0 {
		return protocol.Refused.Errorf("accumulate of type %d: expected 0 (bf16), 1 (fp16) or 2 (fp32)",
			b.Type)
	}
	all, err := s.rangeOf(protocol.Accumulate, b.First, b.Count)
	if err != nil {
		return err
	}
	of := protocol.NumberTypes[b.Type]
	data, err := s.inWindow(protocol.Accumulate, b.Offset, b.Count, uint64(of.Size()))
	if err != nil {
		return err
	}
	added, _, last, half := s.shard.Accumulations()
	again := b.Number == uint64(added) && added > 0 && !half
	if next := added + 1; b.Number != uint64(next) && !again {
		return protocol.OutOfOrder.Errorf("accumulate %d: %d were finished since the gradients were cleared, so the "+
			"next is %d",
			b.Number, added, next)
	}
	now := engine.Accumulation{Range: all, Type: of}
	if (again || half) && now != last {
		return protocol.OutOfOrder.Errorf("accumulate %d of %v: accumulate %d was begun with %v; repeat that, or "+
			"clear the gradients", b.Number, now, b.Number, last)
	}
	if again {
		return nil // the client did not get the answer
	}
	s.header.forgetPrepared()
	s.shard.ForgetArrived()
	return s.shard.Accumulate(now.First, kernel.Array{Type: of, Data: data})
}

// notHalfAdded refuses requests that make no sense while an accumulation is half done.
// An earlier service may have left it so; the client repeats it or clears the
// gradients.
func (s *heldShard) notHalfAdded(kind protocol.Kind) error {
	if added, _, last, half := s.shard.Accumulations(); half {
		return protocol.OutOfOrder.Errorf("%v: accumulate %d, of %v, is half done; repeat it, or clear the gradients",
			kind,
			added+1, last)
	}
	return nil
}
