package job

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/releases"
)

// environment are the releases of what a job runs on, and how the plan has come by them.
type environment struct {
	found *releases.Found   // nil without
	said  map[string]string // by the names of packages
}

// planned are the packages whose releases change a plan, and the flags that go before what an environment has.
func (q *Request) planned() map[string]*string {
	return map[string]*string{"torch": &q.Torch, "transformers": &q.Transformers, "accelerate": &q.AccelerateVersion,
		"deepspeed": &q.DeepSpeedVersion, "bitsandbytes": &q.BitsAndBytes}
}

// defaultsOf are the programs whose files are read with the defaults of one release, by their packages.
var defaultsOf = map[string]struct{ program, release string }{
	"llamafactory": {"LLaMA-Factory", "August 2026 (ff6d4d12)"}, "axolotl": {"axolotl", "July 2026 (067b021c)"},
	"ms-swift": {"ms-swift", "August 2026 (3602360a)"}, "torchtune": {"torchtune", "April 2026 (bd2a0fc7)"},
	"torchtitan": {"torchtitan", "2025"}, "trl": {"TRL", "July 2026 (f2cd5771)"},
}

// readEnvironment takes the releases of a request's environment. Flags go before it.
func (q *Request) readEnvironment() (e environment, err error) {
	if q.Environment == "" {
		return e, nil
	}
	if e.found, err = releases.Read(q.Environment, q.Texts); err != nil {
		return e, err
	}
	e.said = map[string]string{}
	programs := q.planned()
	isOf := func(name string) bool { return programs[name] != nil }
	if !slices.ContainsFunc(e.found.Names(), isOf) {
		return e, fault.File(q.Environment).Inputf("it says no release of %s",
			fault.OneOf(slices.Sorted(maps.Keys(programs))...)).
			WithHint("name requirements with lines such as torch==2.9.0, the output of pip freeze, a lock file, or " +
				"the folder of an environment of Python")
	}
	for name, to := range programs {
		release, is := e.found.Of(name)
		open, isOpen := e.found.Open[name]
		switch {
		case is && *to == "":
			*to = release.Version
			e.said[name] = fmt.Sprintf("%s %s: %v says so", name, release.Version, release.Place)
		case is:
			e.said[name] = fmt.Sprintf("%s %s: a flag says so, and %v says %s", name, *to, release.Place,
				release.Version)
		case isOpen && *to == "":
			e.said[name] = fmt.Sprintf("%s: %v says no one release (%q)", name, open.Place, open.Version)
		}
	}
	return e, nil
}

// ofProgram says which release an environment has of the program whose file was read.
func (e environment) ofProgram(program string) []string {
	for name, of := range defaultsOf {
		release, is := e.found.Of(name)
		if is && (of.program == program || strings.HasPrefix(program, of.program+"'s ")) {
			return []string{fmt.Sprintf("%s %s: %v says so, and the plan has the defaults of %s", name,
				release.Version, release.Place, of.release)}
		}
	}
	return nil
}

// addsInFull reports whether PEFT makes in full what it adds to parameters, as it did before 0.21, by the release of an
// environment. It is usual where none is known.
func (r *resolver) addsInFull(usual bool) (inFull, isKnown bool) {
	release, is := r.environment.found.Of("peft")
	if !is {
		return usual, false
	}
	v, err := version.Parse(release.Version)
	if err != nil {
		return usual, false
	}
	r.assume("peft %s: %v says so", release.Version, release.Place)
	return !v.AtLeast(0, 21, 0), true
}
