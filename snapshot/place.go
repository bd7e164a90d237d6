package snapshot

import (
	"fmt"
	"path"
	"strings"
)

// NoPlace is the place of memory without frames: autograd's threads have none.
const NoPlace = "(no Python frames)"

// place names the line of the source that asked for memory: the innermost Python frame outside of torch, else the
// innermost frame.
func (r *records) place(stack uint32) string {
	frames := r.stacks.of(stack)
	if len(frames) == 0 {
		return NoPlace
	}
	for _, n := range frames {
		file := r.texts.all[r.frames.all[n].file]
		if strings.HasSuffix(file, ".py") && !strings.Contains("/"+file, "/torch/") {
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
