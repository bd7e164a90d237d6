//go:build linux

package tune

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
)

//go:embed links.py
var linksScript string

// longestLinks is the most time for importing torch and for copying.
const longestLinks = 30 * time.Second

// links measures both directions of the link of every GPU, with PyTorch. Where that cannot be, the note says why: a
// profile without links is fine.
func links(ctx context.Context, h *host.Host) (found []profile.Link, note string) {
	if len(h.GPUs) == 0 {
		return []profile.Link{}, "this host has no GPU"
	}
	python, tried := bench.FindPython("torch")
	if python == "" {
		return []profile.Link{}, fmt.Sprintf("no interpreter has torch; tried %s", strings.Join(tried, ", "))
	}
	ctx, cancel := context.WithTimeout(ctx, longestLinks)
	defer cancel()
	out, err := exec.CommandContext(ctx, python, "-c", linksScript).Output()
	var answer struct {
		Note  string         `json:"note"`
		Links []profile.Link `json:"links"`
	}
	if err == nil {
		err = json.Unmarshal(out, &answer)
	}
	var failed *exec.ExitError
	if errors.As(err, &failed) && len(failed.Stderr) > 0 {
		err = fmt.Errorf("%w: %s", err, lastLine(string(failed.Stderr)))
	}
	if err != nil {
		return []profile.Link{}, fmt.Sprintf("%s could not measure them: %v", python, err)
	}
	for _, l := range answer.Links {
		if !(l.ToGPU > 0 && l.FromGPU > 0 && l.Together > 0) {
			return []profile.Link{}, fmt.Sprintf("%s measured a link of no speed", python)
		}
	}
	return append([]profile.Link{}, answer.Links...), answer.Note
}
