package delta

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"os"
	"slices"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// Extension is that of the files of messages.
const Extension = ".delta"

// mostMessage is the size of the largest message that is read: it is read at once.
const mostMessage = 1 << 40

// listed is a message of a series, without its changes.
type listed struct {
	Header
	path     string
	pieces   []Piece
	elements uint64
	bytes    int64
	of       shard
}

// shard is the digest of a table of pieces: that of all messages about one shard of the parameters.
type shard [sha256.Size]byte

// series are messages of a training, in the order of their steps.
type series []listed

// open reads a message of a file.
func open(path string) (*Message, error) {
	data, err := files.Read(path, mostMessage)
	if err != nil {
		return nil, fault.File(path).Inputf("%v", errors.Unwrap(err))
	}
	m, err := Read(data)
	if err != nil {
		return nil, fault.File(path).Inputf("%v", err)
	}
	return m, nil
}

// list reads the messages in files and folders. It keeps one of them in memory at a time.
func list(paths []string) (s series, err error) {
	for _, path := range paths {
		all := []string{path}
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			if all, err = inFolder(path, Extension); err != nil {
				return nil, err
			}
			if len(all) == 0 {
				return nil, fault.File(path).Inputf("it has no message, a file whose name ends in %s", Extension)
			}
		}
		for _, path := range all {
			m, err := open(path)
			if err != nil {
				return nil, err
			}
			l := listed{Header: m.Header, path: path, pieces: m.Pieces, of: sha256.Sum256(m.streams[table])}
			for i := range m.Pieces {
				l.elements += m.Pieces[i].Count
				l.bytes += m.Pieces[i].bytes()
			}
			s = append(s, l)
		}
	}
	slices.SortStableFunc(s, func(a, b listed) int {
		return cmp.Or(cmp.Compare(a.To, b.To), bytes.Compare(a.of[:], b.of[:]), cmp.Compare(a.From, b.From))
	})
	for i := 1; i < len(s); i++ {
		if a, b := &s[i-1], &s[i]; a.To == b.To && a.of == b.of && a.After != b.After {
			return nil, fault.File(b.path).Inputf("it leads to other parameters after step %d than %s: they are of "+
				"two trainings", b.To, a.path).WithHint("give the messages of one training")
		}
	}
	return s, nil
}

// upTo returns the messages that lead to a step, or to the last that is complete if it is 0. A trainer may have died
// between the messages of its ranks and types. So a step is not complete that is about fewer elements than the step
// before, or the first one than the step after.
func (s series) upTo(step uint64) (series, error) {
	for end := len(s); end > 0; {
		last := s[:end].last()
		other := s[:end-len(last)]
		end = len(other)
		if end == 0 {
			other = s[len(last):].first()
		}
		switch to := last[0].To; {
		case step != 0 && to != step:
		case len(other) == 0 || last.elements() >= other.last().elements():
			return s[:end+len(last)], nil
		case step != 0:
			other = other.last()
			return nil, fault.Inputf("the messages of step %d are about %d elements, and those of step %d about %d: "+
				"some messages of step %d are missing", to, last.elements(), other[0].To, other.elements(), to).
				WithHint("give the messages of all ranks and types of parameters, or another --step")
		}
	}
	return nil, fault.Inputf("no message leads to step %d: they lead to steps %d to %d", step, s[0].To, s[len(s)-1].To).
		WithHint("give one of these as --step")
}

// first returns the messages of the first step.
func (s series) first() series {
	for i := range s {
		if s[i].To != s[0].To {
			return s[:i]
		}
	}
	return s
}

// elements returns how many elements the messages of a step are about.
func (s series) elements() (n uint64) {
	for i := range s {
		if !slices.ContainsFunc(s[:i], func(l listed) bool { return l.of == s[i].of }) {
			n += s[i].elements
		}
	}
	return n
}

// last returns the messages of the last step.
func (s series) last() series {
	to := s[len(s)-1].To
	return s[slices.IndexFunc(s, func(l listed) bool { return l.To == to }):]
}

// whole returns the messages from the last step on whose messages all have all parameters, and nil without such a step.
func (s series) whole() series {
	for end := len(s); end > 0; {
		step := s[:end].last()
		if end -= len(step); !slices.ContainsFunc(step, func(l listed) bool { return !l.Whole }) {
			return s[end:]
		}
	}
	return nil
}
