package profile

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe/strict"
	"plimsoll/internal/state/optim/kernel"
)

// Path returns the path of this user's file: host.json in the folder plimsoll of the user's configuration.
func Path() (string, error) {
	folder, err := os.UserConfigDir()
	if err != nil {
		return "", &fault.Input{What: "the folder of your configuration", Err: err,
			Hint: "set XDG_CONFIG_HOME, or name the file"}
	}
	return filepath.Join(folder, "plimsoll", "host.json"), nil
}

// limit is the largest file. A profile takes some 50 KiB.
const limit = 16 << 20

// Load reads a file. The error is a *fault.Input, with the cause fs.ErrNotExist where there is no file.
func Load(path string) (*File, error) {
	text, err := files.Read(path, limit)
	if err != nil {
		return nil, readFault(path, err)
	}
	return Parse(path, text)
}

// LoadOrNew is Load for a file that is to be changed: where there is none, it is empty.
func LoadOrNew(path string) (*File, error) {
	f, err := Load(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &File{Schema: Schema}, nil
	}
	return f, err
}

func readFault(path string, err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		err = at.Err
	}
	return &fault.Input{Where: fault.File(path), Err: err}
}

// Save writes the file: completely or not at all.
func (f *File) Save(path string) error {
	text, err := json.MarshalIndent(f, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = files.Replace(path, append(text, '\n'))
	}
	if err != nil {
		return &fault.Input{What: "writing the host profile", Err: err, Hint: "name another file with --output"}
	}
	return nil
}

// mostCores is more than any host has.
const mostCores = 1 << 16

var (
	cores    = strict.Integer().Digits().From(1).To(mostCores)
	positive = strict.Number().From(1e-9)
	number   = strict.Number().From(0)
	state    = strict.Text(kernel.StateNames()...)
	moments  = strict.Text(kernel.MomentNames()...)

	topologyRule = strict.Object(
		strict.Text().For("cpu online_cpus"), cores.For("cores"),
		strict.List(nodeRule).For("numa_nodes"), strict.Integer().Digits().From(0).For("memory_bytes"))
	nodeRule   = strict.Object(strict.Integer().Digits().From(0).For("id"), strict.Text().For("cpus"))
	limitsRule = strict.Object(strict.Text().For("usable_cpus cpuset_cpus"), number.For("quota_cpus"))
	curveRule  = strict.Object(
		cores.For("ranks knee_cores"), strict.Integer().Digits().From(AllNodes).For("numa_node"),
		state.For("state"), moments.For("moments"), positive.For("bytes_per_parameter"),
		strict.List(pointRule).For("points"))
	pointRule = strict.Object(cores.For("cores samples"), positive.For("bytes_per_second"), number.For("uncertainty"))
	timesRule = strict.Object(cores.For("ranks"), strict.List(timePointRule).For("points"))

	timePointRule = strict.Object(cores.For("cores samples"), positive.For("seconds"))
	splitRule     = strict.Object(
		cores.For("ranks trainer_cores optimizer_cores"), state.For("state"), moments.For("moments"),
		strict.Boolean().For("shared"), positive.For("bytes_per_second trainer_slowdown"))
	linkRule = strict.Object(strict.Text().For("gpu"),
		positive.For("to_gpu_bytes_per_second from_gpu_bytes_per_second both_bytes_per_second"))
	profileRule = strict.Object(
		strict.Text().For("measured version links_note"), topologyRule.For("topology"),
		limitsRule.For("limits"), state.For("state"), moments.For("moments"),
		strict.Text(LoadBuiltIn, LoadCommand).For("load"), strict.Text("", TimeOfSteps, TimeOfRun).For("load_times"),
		strict.Boolean().For("steps_hold_update"), strict.Text(Overlaps...).For("overlap"),
		strict.List(strict.Text()).For("command"),
		positive.To(1).For("share_of_best"), number.For("others_cpu_share"),
		strict.List(curveRule).For("curves"), strict.List(timesRule).For("trainer_times"),
		strict.List(splitRule).For("splits"), strict.List(linkRule).For("links"))
	fileRule = strict.Object(strict.Text(Schema).For("schema"), strict.List(profileRule).For("profiles"))
)

// Parse reads the text of a file. The error is a *fault.Input.
func Parse(file string, text []byte) (*File, error) {
	document, err := strict.ParseJSON(file, text)
	if err != nil {
		return nil, err
	}
	r, err := read(document, "", fileRule)
	if err != nil {
		return nil, err
	}
	f := &File{Schema: r.Word("schema"), Profiles: []Profile{}}
	return f, r.each("profiles", profileRule, func(r *reader) error {
		p, err := r.profile()
		f.Profiles = append(f.Profiles, p)
		return err
	})
}

// reader is an object of the file, every key of which is required.
type reader struct {
	*strict.Reader
	path string
}

func read(d *strict.Document, path string, rule strict.Rule) (*reader, error) {
	r, err := strict.Schema{Program: "plimsoll", Path: path, Rule: rule}.Read(d)
	if err != nil {
		return nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(rule.Keys())) {
		if !r.Has(key) {
			what := "the file"
			if path != "" {
				what = path
			}
			return nil, d.Inputf(d.Root.At, "%s has no key %q", what, key).
				WithHint("measure the host again: plimsoll tune")
		}
	}
	return &reader{r, path}, nil
}

// within returns the object at a path.
func (r *reader) within(key string, rule strict.Rule) (*reader, error) {
	return r.object(r.Value(key), r.below(key), rule)
}

func (r *reader) object(v *strict.Value, path string, rule strict.Rule) (*reader, error) {
	return read(&strict.Document{File: r.File, Text: r.Text, Root: v}, path, rule)
}

func (r *reader) below(key string) string {
	if r.path == "" {
		return key
	}
	return r.path + "." + key
}

// each reads the objects of a list.
func (r *reader) each(key string, rule strict.Rule, take func(*reader) error) error {
	for i, element := range r.Value(key).Elements {
		below, err := r.object(element, fmt.Sprintf("%s[%d]", r.below(key), i), rule)
		if err == nil {
			err = take(below)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) profile() (Profile, error) {
	p := Profile{
		Version: r.Word("version"), State: r.Word("state"), Moments: r.Word("moments"), Overlap: r.Word("overlap"),
		Load: r.Word("load"), Command: append([]string{}, r.Value("command").Texts()...), Links: []Link{},
		LoadTimes: r.Word("load_times"), StepsHoldUpdate: r.Truth("steps_hold_update"),
		ShareOfBest: r.Number("share_of_best"), Others: r.Number("others_cpu_share"), LinksNote: r.Word("links_note"),
		Curves: []Curve{}, TrainerTimes: []TrainerTimes{}, Splits: []Split{},
	}
	var err error
	if p.Measured, err = time.Parse(time.RFC3339, r.Word("measured")); err != nil {
		return p, r.Fault("measured", fmt.Sprintf("is %q, expected a time such as 2026-11-23T07:00:00Z",
			r.Word("measured")), "")
	}
	if err = r.machine(&p); err != nil {
		return p, err
	}
	return p, r.measurements(&p)
}

// machine reads what the profile is keyed by.
func (r *reader) machine(p *Profile) error {
	t, err := r.within("topology", topologyRule)
	if err != nil {
		return err
	}
	p.Topology = Topology{CPU: t.Word("cpu"), Cores: int(t.Integer("cores")), Online: t.Word("online_cpus"),
		Memory: ledger.Bytes(t.Integer("memory_bytes")), NUMANodes: []Node{}}
	err = t.each("numa_nodes", nodeRule, func(r *reader) error {
		p.Topology.NUMANodes = append(p.Topology.NUMANodes, Node{int(r.Integer("id")), r.Word("cpus")})
		return r.checkCPUs("cpus")
	})
	if err != nil {
		return err
	}
	l, err := r.within("limits", limitsRule)
	if err != nil {
		return err
	}
	p.Limits = Limits{Usable: l.Word("usable_cpus"), Cpuset: l.Word("cpuset_cpus"), Quota: l.Number("quota_cpus")}
	return cmp.Or(t.checkCPUs("online_cpus"), l.checkCPUs("usable_cpus"), l.checkCPUs("cpuset_cpus"))
}

// checkCPUs refuses what is no list of CPUs.
func (r *reader) checkCPUs(key string) error {
	if list := r.Word(key); !validCPUs(list) {
		return r.Fault(key, fmt.Sprintf("is %q, expected a list of CPUs such as 0-3,8", list), "")
	}
	return nil
}

// measurements reads what was measured.
func (r *reader) measurements(p *Profile) error {
	return cmp.Or(
		r.each("curves", curveRule, func(r *reader) error {
			c := Curve{
				Ranks: int(r.Integer("ranks")), NUMANode: int(r.Integer("numa_node")), State: r.Word("state"),
				Moments: r.Word("moments"), BytesPerParameter: r.Number("bytes_per_parameter"),
				Knee: int(r.Integer("knee_cores")), Points: []Point{},
			}
			err := r.each("points", pointRule, func(r *reader) error {
				c.Points = append(c.Points, Point{int(r.Integer("cores")), r.Number("bytes_per_second"),
					int(r.Integer("samples")), r.Number("uncertainty")})
				return nil
			})
			p.Curves = append(p.Curves, c)
			return err
		}),
		r.each("trainer_times", timesRule, func(r *reader) error {
			l := TrainerTimes{Ranks: int(r.Integer("ranks")), Points: []TrainerPoint{}}
			err := r.each("points", timePointRule, func(r *reader) error {
				l.Points = append(l.Points, TrainerPoint{int(r.Integer("cores")), r.Number("seconds"),
					int(r.Integer("samples"))})
				return nil
			})
			p.TrainerTimes = append(p.TrainerTimes, l)
			return err
		}),
		r.each("splits", splitRule, func(r *reader) error {
			p.Splits = append(p.Splits, Split{
				Ranks: int(r.Integer("ranks")), State: r.Word("state"), Moments: r.Word("moments"),
				Trainer: int(r.Integer("trainer_cores")), Optimizer: int(r.Integer("optimizer_cores")),
				Shared: r.Truth("shared"), BytesPerSecond: r.Number("bytes_per_second"),
				Slowdown: r.Number("trainer_slowdown"),
			})
			return nil
		}),
		r.each("links", linkRule, func(r *reader) error {
			p.Links = append(p.Links, Link{r.Word("gpu"), r.Number("to_gpu_bytes_per_second"),
				r.Number("from_gpu_bytes_per_second"), r.Number("both_bytes_per_second")})
			return nil
		}),
	)
}
