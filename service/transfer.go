package service

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/optim/kernel"
)

// Streams of transfers.
const (
	masterStream = iota
	firstMomentStream
	secondMomentStream
	streams
)

// numberTypes are the types of numbers in the window, in the numbering of accumulate.
var numberTypes = [...]dtype.Type{dtype.BF16, dtype.F16, dtype.F32}

const maximumWindow = 1 << 40

// setWindow gives the session a window.
func (c *connection) setWindow(r request) (reply, error) {
	body, err := decode[windowBody](r.kind, r.body)
	if err != nil {
		return reply{}, err
	}
	return reply{}, c.session.setWindow(body.Bytes, r.files[0])
}

// setWindow maps the client's memfd. The seal keeps it from shrinking, so accesses
// cannot end this process.
func (s *session) setWindow(size uint64, file *os.File) error {
	if size == 0 || size > maximumWindow {
		return fail(Refused, "window of %d bytes: expected 1 to %d", size, uint64(maximumWindow))
	}
	if err := sealed(file, int64(size), unix.F_SEAL_SHRINK); err != nil {
		return fail(Refused, "window: %v", err)
	}
	mapped, err := unix.Mmap(int(file.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail(Refused, "window: mmap of %d bytes: %v", size, err)
	}
	s.dropWindow()
	s.window = mapped
	return nil
}

func (s *session) dropWindow() {
	if s.window != nil {
		_ = unix.Munmap(s.window) // cannot fail: the mapping is ours
		s.window = nil
	}
}

// transferArguments checks a transfer and returns its numbers, which lie in the window.
func (s *session) transferArguments(kind Kind, t transfer) ([]float32, error) {
	if t.Zero != 0 {
		return nil, fail(Malformed, "%v: a field that must be 0 is %d", kind, t.Zero)
	}
	format := s.shard.Config().Format
	if t.What >= streams || int(t.What) > format.Algorithm.Moments() {
		return nil, fail(Refused, "%v: stream %d: %s has master weights (0) and %d moments", kind, t.What,
			s.document.Optimizer, format.Algorithm.Moments())
	}
	if err := s.checkStretch(kind, t.First, t.Count); err != nil {
		return nil, err
	}
	data, err := s.inWindow(kind, t.Offset, t.Count, 4)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(data))), t.Count), nil
}

// write copies numbers from the window into the state.
func (s *session) write(t transfer) error {
	numbers, err := s.transferArguments(Write, t)
	if err != nil {
		return err
	}
	s.saveIsOver.Wait() // the checkpoint needs the state as it was
	s.record.beginWrite()
	if t.What != masterStream {
		s.shard.WriteMoment(int(t.What)-firstMomentStream, int64(t.First), numbers)
		return nil
	}
	format := s.shard.Config().Format
	s.eachOf(t, func(c kernel.Chunk, from, end int, at int) {
		for i, w := range numbers[at : at+end-from] {
			c.PutMasterWeight(format, from+i, w)
		}
	})
	return nil
}

// read copies numbers from the state into the window.
func (s *session) read(t transfer) error {
	numbers, err := s.transferArguments(Read, t)
	if err != nil {
		return err
	}
	format := s.shard.Config().Format
	s.eachOf(t, func(c kernel.Chunk, from, end int, at int) {
		for i := from; i < end; i++ {
			if t.What == masterStream {
				numbers[at+i-from] = c.MasterWeight(format, i)
			} else {
				numbers[at+i-from] = c.Moment(int(t.What)-firstMomentStream, i)
			}
		}
	})
	return nil
}

// eachOf has the workers call body for the range of each chunk that a transfer covers:
// elements from to end of the chunk, which begin at position at of the transfer.
func (s *session) eachOf(t transfer, body func(c kernel.Chunk, from, end, at int)) {
	first, last := int64(t.First), int64(t.First+t.Count)
	s.shard.Each(func(place int64, c kernel.Chunk) {
		from, end := max(first, place), min(last, place+int64(c.Len()))
		if from < end {
			body(c, int(from-place), int(end-place), int(from-first))
		}
	})
}

// accumulate adds the numbers in the window to the gradients. It does so once for each
// request number, even if the client repeats the request.
func (s *session) accumulate(b accumulation) error {
	if int(b.Type) >= len(numberTypes) || b.Zero != 0 {
		return fail(Refused, "accumulate of type %d: expected 0 (bf16), 1 (fp16) or 2 (fp32)", b.Type)
	}
	if err := s.checkStretch(Accumulate, b.First, b.Count); err != nil {
		return err
	}
	of := numberTypes[b.Type]
	data, err := s.inWindow(Accumulate, b.Offset, b.Count, uint64(of.Size()))
	if err != nil {
		return err
	}
	added, _, last, half := s.shard.Accumulations()
	again := b.Number == uint64(added) && added > 0 && !half
	if next := added + 1; b.Number != uint64(next) && !again {
		return fail(OutOfOrder, "accumulate %d: %d were finished since the gradients were cleared, so the next is %d",
			b.Number, added, next)
	}
	now := engine.Accumulation{First: int64(b.First), Count: int64(b.Count), Type: of}
	if (again || half) && now != last {
		return fail(OutOfOrder, "accumulate %d of %v: accumulate %d was begun with %v; repeat that, or "+
			"clear the gradients", b.Number, now, b.Number, last)
	}
	if again {
		return nil // the client did not get the answer
	}
	s.record.forgetPrepared()
	s.shard.ForgetArrived()
	return s.shard.Accumulate(now.First, kernel.Array{Type: of, Data: data})
}

// notHalfAdded refuses requests that make no sense while an accumulation is half done.
// An earlier service may have left it so; the client repeats it or clears the
// gradients.
func (s *session) notHalfAdded(kind Kind) error {
	if added, _, last, half := s.shard.Accumulations(); half {
		return fail(OutOfOrder, "%v: accumulate %d, of %v, is half done; repeat it, or clear the gradients", kind,
			added+1, last)
	}
	return nil
}
