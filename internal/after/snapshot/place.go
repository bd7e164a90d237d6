package snapshot

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strings"

	"plimsoll/internal/base/ledger"
)

// NoPlace is the place of memory without frames: autograd's threads have none.
const NoPlace = "(no Python frames)"

// helpers are folders and files of code that others call to allocate.
var helpers = []string{"/torch/", "/deepspeed/accelerator/", "/deepspeed/utils/nvtx.py"}

// place names the line of the source that asked for memory: the innermost Python frame outside of helpers, else the
// innermost frame.
func (r *records) place(stack uint32) string {
	frames := r.stacks.of(stack)
	if len(frames) == 0 {
		return NoPlace
	}
	for _, n := range frames {
		file := r.texts.all[r.frames.all[n].file]
		isHelper := func(folder string) bool { return strings.Contains("/"+file, folder) }
		if strings.HasSuffix(file, ".py") && !slices.ContainsFunc(helpers, isHelper) {
			return r.shown(n)
		}
	}
	return r.shown(frames[0])
}

// shown writes a frame: its file from the name of the package on, or the last two names of its path.
func (r *records) shown(frame uint32) string {
	f := r.frames.all[frame]
	file := strings.ReplaceAll(r.texts.all[f.file], `\`, "/")
	if _, within, found := strings.Cut(file, "-packages/"); found {
		file = within
	} else if strings.HasPrefix(file, "/") {
		file = strings.TrimPrefix(path.Join(path.Base(path.Dir(file)), path.Base(file)), "/")
	}
	return fmt.Sprintf("%s:%d %s", file, f.line, r.texts.all[f.name])
}

// Line is a frame of Python that no snapshot has recorded.
type Line struct {
	File, Function string
	Number         int
}

// Account is what memory is for that a stack asked for, and the line of the source.
type Account struct {
	Component ledger.Component
	Place     string
}

// Accounts returns those of stacks, whose innermost frames are first.
func Accounts(stacks [][]Line) []Account {
	r, free := newRecords(), &budget{math.MaxInt64}
	var numbers []uint32
	for _, lines := range stacks {
		var frames []uint32
		for _, l := range lines {
			f := r.frames.number(free, Frame{file: r.texts.number(free, []byte(l.File)),
				name: r.texts.number(free, []byte(l.Function)), line: int32(l.Number)})
			if !r.isStage(f) {
				frames = append(frames, f)
			}
		}
		numbers = append(numbers, r.stacks.number(free, frames))
	}
	classes, accounts := newClassifier(r), make([]Account, len(stacks))
	for i, n := range numbers {
		accounts[i] = Account{classes.of(n), r.place(n)}
	}
	return accounts
}
