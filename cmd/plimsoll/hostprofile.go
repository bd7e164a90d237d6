package main

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/profile"
)

// noProfile is the value of --host-profile that ignores all profiles.
const noProfile = "none"

const hostProfileFlagName = "host-profile"

func hostProfileFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, hostProfileFlagName, "", "`file` of plimsoll tune that says how cores are divided; "+
		noProfile+" ignores it (default: plimsoll/host.json in the folder of your configuration)")
}

// hostProfile is the file that a verb takes splits from.
type hostProfile struct {
	name    string // as the user has given it; may be empty
	reserve int    // cores that are left to the system, which a profile may not count on
	logf    func(format string, values ...any)
}

// of returns the profile of a host, or nil where there is none, and the path of its file. A profile never stops a verb:
// it says why a file is not used, and the verb goes on without it.
func (p hostProfile) of(h *host.Host) (found *profile.Profile, path string) {
	if p.name == noProfile {
		return nil, ""
	}
	path = p.name
	if path == "" {
		var err error
		if path, err = profile.Path(); err != nil {
			return nil, "" // a user without a folder for configuration has no profile
		}
	}
	h, err := binding.Reserve(h, p.reserve)
	if err != nil {
		return nil, "" // the verb itself refuses so many cores
	}
	file, err := profile.Load(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && p.name == "":
		return nil, ""
	case err != nil:
		p.logf("the host profile is not used: %v", err)
		return nil, ""
	}
	found, stale := file.For(h)
	if found == nil {
		p.logf("the host profile %s is not used: %s; plimsoll tune measures this host again", path, stale)
		return nil, ""
	}
	return found, path
}

// split returns the profile's split for a number of ranks and a format, and a note that names it. An empty format is
// the profile's own. Without a split it returns nil.
func (p hostProfile) split(h *host.Host, ranks int, state, moments string) (split *profile.Split, note string) {
	found, path := p.of(h)
	if found == nil {
		return nil, ""
	}
	if split = found.Split(ranks, state, moments); split == nil {
		p.logf("the host profile %s has no split for %s", path, missing(found, ranks, state, moments))
		return nil, ""
	}
	busy := ""
	if found.InDoubt() {
		busy = fmt.Sprintf(" while other processes used %.0f %% of the CPUs: measure it again", 100*found.Others)
	}
	return split, fmt.Sprintf("each rank has %v (host profile %s, measured %s%s)", split, path,
		found.Measured.Local().Format(time.DateTime), busy)
}

// missing says which split a profile lacks, and how to get it.
func missing(found *profile.Profile, ranks int, state, moments string) string {
	if found.Split(ranks, "", "") != nil { // tune leaves other formats out where it has no time for them
		return fmt.Sprintf("state %s with %s moments: plimsoll tune with a larger --budget measures it", state, moments)
	}
	what := fmt.Sprintf("%d ranks", ranks)
	if ranks == 1 {
		what = "1 rank"
	}
	return fmt.Sprintf("%s, but for %s: plimsoll tune --ranks %d measures it", what, found.RanksMeasured(), ranks)
}
