package job

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/recipe/strict"
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

// flagOfReleases is the flag that says releases of packages.
const flagOfReleases = "--release"

// addReleases puts the releases of the flag over those of an environment.
func (q *Request) addReleases(e *environment) error {
	if len(q.Releases) > 0 && e.found == nil {
		e.found = &releases.Found{All: map[string]releases.Release{}}
	}
	known := append(slices.Collect(maps.Keys(q.planned())), recipe.Packages()...)
	for _, said := range q.Releases {
		name, text, is := strings.Cut(strings.ReplaceAll(said, "==", "="), "=")
		name = releases.Normalized(name)
		_, err := version.Parse(text)
		switch {
		case !is || err != nil:
			return fault.Inputf("%s is %q, expected a package and its release, such as trl=1.6.0", flagOfReleases, said)
		case !slices.Contains(known, name):
			slices.Sort(known)
			return fault.Inputf("%s names %q, and no plan depends on its release", flagOfReleases, name).
				WithHint(cmp.Or(strict.DidYouMean(name, known), "expected "+fault.OneOf(known...)))
		}
		e.found.All[name] = releases.Release{Version: text, Place: fault.Position{File: flagOfReleases}}
	}
	return nil
}

// readEnvironment takes the releases of a request's environment. Flags go before it.
func (q *Request) readEnvironment() (e environment, err error) {
	programs := q.planned()
	if q.Environment != "" {
		if e.found, err = releases.Read(q.Environment, q.Texts); err != nil {
			return e, err
		}
	}
	isOf := func(name string) bool { return programs[name] != nil || slices.Contains(recipe.Packages(), name) }
	if e.found != nil && !slices.ContainsFunc(e.found.Names(), isOf) {
		return e, fault.File(q.Environment).Inputf("it says no release of %s",
			fault.OneOf(slices.Sorted(maps.Keys(programs))...)).
			WithHint("name requirements with lines such as torch==2.9.0, the output of pip freeze, a lock file, or " +
				"the folder of an environment of Python")
	}
	if err := q.addReleases(&e); err != nil || e.found == nil {
		return e, err
	}
	e.said = map[string]string{}
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

// releaseOf returns the release of a package, zero where none is known.
func (e environment) releaseOf(name string) version.Version {
	release, is := e.found.Of(name)
	if !is {
		return version.Version{}
	}
	v, err := version.Parse(release.Version)
	if err != nil {
		return version.Version{}
	}
	return v
}

// ofProgram says which release of the program whose file was read the plan is for.
func (e environment) ofProgram(f *recipe.Framework) string {
	release, is := e.found.Of(f.Package)
	switch {
	case f.Package == "":
		return ""
	case is && !f.Assumed:
		return fmt.Sprintf("%s %s: %v says so", f.Package, release.Version, release.Place)
	}
	open, isOpen := e.found.OpenOf(f.Package)
	if isOpen {
		return fmt.Sprintf("%s %v: %v says no one release (%q)", f.Package, f.Release, open.Place, open.Version)
	}
	return fmt.Sprintf("%s %v: no version was given", f.Package, f.Release)
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
