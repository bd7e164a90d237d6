// Package profile is what plimsoll tune has measured of hosts: the file, and whether what it says still holds.
//
// The file is one for a user. It holds a profile for every combination of a machine and its limits, because a home
// directory may be that of many hosts, and a batch system gives each job other CPUs.
package profile

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
)

// Schema is the schema of the file.
const Schema = "plimsoll.host/1"

// File is the document of the file.
type File struct {
	Schema   string    `json:"schema"`
	Profiles []Profile `json:"profiles"`
}

// Profile is what was measured of one host under its limits.
type Profile struct {
	Measured time.Time `json:"measured"`
	Version  string    `json:"version"` // of plimsoll
	Topology Topology  `json:"topology"`
	Limits   Limits    `json:"limits"`
	// State and Moments are the format that commands split the cores for if they do not know the job's own.
	State   string `json:"state"`
	Moments string `json:"moments"`
	Overlap string `json:"overlap"` // of the steps that the splits are for
	// Load is what took the place of a trainer: LoadBuiltIn, or the command of the user.
	Load    string   `json:"load"`
	Command []string `json:"command"`
	// LoadTimes says what the time of the load is: TimeOfSteps or TimeOfRun; empty for the load of our own.
	LoadTimes string `json:"load_times"`
	// StepsHoldUpdate says that the load has used the optimizer service: its steps hold the update.
	StepsHoldUpdate bool    `json:"steps_hold_update"`
	ShareOfBest     float64 `json:"share_of_best"` // that a knee reaches
	// Others is the part of the time of the CPUs that other processes used meanwhile, from 0 to 1. It is 0 with a
	// command, whose processes are others as well.
	Others       float64        `json:"others_cpu_share"`
	Curves       []Curve        `json:"curves"`
	TrainerTimes []TrainerTimes `json:"trainer_times"`
	Splits       []Split        `json:"splits"`
	Links        []Link         `json:"links"`
	// LinksNote says why no link was measured.
	LinksNote string `json:"links_note"`
}

// Loads and their times.
const (
	LoadBuiltIn = "built-in"
	LoadCommand = "command"

	TimeOfSteps = "marked steps"
	TimeOfRun   = "whole run"
)

// Overlaps of the update with the trainer's work.
const (
	NoOverlap       = "none"
	OverlapForward  = "forward"
	OverlapBackward = "backward"
)

// Overlaps lists them.
var Overlaps = []string{NoOverlap, OverlapForward, OverlapBackward}

// Topology is the machine.
type Topology struct {
	CPU       string       `json:"cpu"`
	Cores     int          `json:"cores"`
	Online    string       `json:"online_cpus"`
	NUMANodes []Node       `json:"numa_nodes"` // those with CPUs
	Memory    ledger.Bytes `json:"memory_bytes"`
}

// Node is a NUMA node.
type Node struct {
	ID   int    `json:"id"`
	CPUs string `json:"cpus"`
}

// Limits are what this process may use of the machine.
type Limits struct {
	Usable string  `json:"usable_cpus"`
	Cpuset string  `json:"cpuset_cpus"`
	Quota  float64 `json:"quota_cpus"` // 0 for none
}

// Curve is the speed of an update as a function of its cores.
type Curve struct {
	Ranks             int     `json:"ranks"`
	NUMANode          int     `json:"numa_node"` // AllNodes where workers are on all of them
	State             string  `json:"state"`
	Moments           string  `json:"moments"`
	BytesPerParameter float64 `json:"bytes_per_parameter"` // that an update moves
	Points            []Point `json:"points"`
	Knee              int     `json:"knee_cores"` // of each rank
}

// AllNodes is the node of a curve that is not of one node.
const AllNodes = -1

// Point is what so many cores of each rank reach, for all ranks together.
type Point struct {
	Cores          int     `json:"cores"`
	BytesPerSecond float64 `json:"bytes_per_second"`
	Samples        int     `json:"samples"`
	Uncertainty    float64 `json:"uncertainty"` // the standard error, as a fraction
}

// TrainerTimes is the time of the trainer as a function of its cores.
type TrainerTimes struct {
	Ranks  int            `json:"ranks"`
	Points []TrainerPoint `json:"points"`
}

// TrainerPoint is the time of the trainer with so many cores of each rank.
type TrainerPoint struct {
	Cores   int     `json:"cores"`
	Seconds float64 `json:"seconds"`
	Samples int     `json:"samples"`
}

// Split is the best split of a rank's cores.
type Split struct {
	Ranks     int    `json:"ranks"`
	State     string `json:"state"`
	Moments   string `json:"moments"`
	Trainer   int    `json:"trainer_cores"`
	Optimizer int    `json:"optimizer_cores"`
	// Shared says that both roles use all cores, in turns.
	Shared         bool    `json:"shared"`
	BytesPerSecond float64 `json:"bytes_per_second"` // of the update, for all ranks together
	// Slowdown is the trainer's time over that with the most cores that were measured.
	Slowdown float64 `json:"trainer_slowdown"`
}

// Link is the connection of a GPU.
type Link struct {
	GPU      string  `json:"gpu"`
	ToGPU    float64 `json:"to_gpu_bytes_per_second"`
	FromGPU  float64 `json:"from_gpu_bytes_per_second"`
	Together float64 `json:"both_bytes_per_second"` // the sum of both directions at the same time
}

// TopologyOf describes the machine of a host.
func TopologyOf(h *host.Host) Topology {
	t := Topology{CPU: h.Name, Cores: len(h.Cores), Online: h.Online.String(), Memory: h.Memory.Total,
		NUMANodes: []Node{}}
	for _, node := range h.Nodes {
		if !node.CPUs.IsEmpty() {
			t.NUMANodes = append(t.NUMANodes, Node{node.ID, node.CPUs.String()})
		}
	}
	return t
}

// LimitsOf describes the limits of a host.
func LimitsOf(h *host.Host) Limits {
	return Limits{Usable: h.CPUs.String(), Cpuset: h.Cpuset.String(), Quota: h.Quota}
}

// sameMemory is how far sizes of memory may be apart on the same machine: kernels keep different amounts for
// themselves.
const sameMemory = 0.02

// differences says, fact by fact, what has changed since the profile was measured.
func (p *Profile) differences(t Topology, l Limits) (list []string) {
	was := func(what string, before, now any) {
		list = append(list, fmt.Sprintf("%s: %v when measured, %v now", what, before, now))
	}
	if p.Topology.CPU != t.CPU {
		was("CPU model", p.Topology.CPU, t.CPU)
	}
	if p.Topology.Cores != t.Cores {
		was("cores", p.Topology.Cores, t.Cores)
	}
	if p.Topology.Online != t.Online {
		was("online CPUs", p.Topology.Online, t.Online)
	}
	if !slices.Equal(p.Topology.NUMANodes, t.NUMANodes) {
		was("NUMA nodes", nodes(p.Topology.NUMANodes), nodes(t.NUMANodes))
	}
	if math.Abs(float64(p.Topology.Memory-t.Memory)) > sameMemory*float64(t.Memory) {
		was("memory", p.Topology.Memory, t.Memory)
	}
	if p.Limits.Cpuset != l.Cpuset {
		was("cpuset", p.Limits.Cpuset, l.Cpuset)
	}
	if p.Limits.Usable != l.Usable {
		was("usable CPUs", p.Limits.Usable, l.Usable)
	}
	if p.Limits.Quota != l.Quota {
		was("CPU quota", quota(p.Limits.Quota), quota(l.Quota))
	}
	return list
}

func nodes(list []Node) string {
	text := []string{}
	for _, node := range list {
		text = append(text, fmt.Sprintf("%d (CPUs %s)", node.ID, node.CPUs))
	}
	return cmp.Or(strings.Join(text, ", "), "none")
}

func quota(cpus float64) string {
	if cpus == 0 {
		return "none"
	}
	return fmt.Sprintf("%.4g CPUs", cpus)
}

// For returns the profile of the host, or else nil and why there is none: what has changed since the most similar
// profile.
func (f *File) For(h *host.Host) (*Profile, string) {
	if len(f.Profiles) == 0 {
		return nil, "it has no profile"
	}
	t, l := TopologyOf(h), LimitsOf(h)
	var least []string
	for i := range f.Profiles {
		changed := f.Profiles[i].differences(t, l)
		if len(changed) == 0 {
			return &f.Profiles[i], ""
		}
		if least == nil || len(changed) < len(least) {
			least = changed
		}
	}
	return nil, strings.Join(least, "; ")
}

// mostProfiles bounds the file. The oldest profiles are left out.
const mostProfiles = 64

// Put adds a profile. It replaces the one of the same machine and limits.
func (f *File) Put(p Profile) {
	f.Schema = Schema
	f.Profiles = slices.DeleteFunc(f.Profiles, func(old Profile) bool {
		return len(old.differences(p.Topology, p.Limits)) == 0
	})
	f.Profiles = append(f.Profiles, p)
	f.Profiles = f.Profiles[max(0, len(f.Profiles)-mostProfiles):]
}

// busyHost is how much of the CPUs other processes may use before a profile is in doubt.
const busyHost = 0.1

// InDoubt reports whether other processes used so much of the CPUs that no median helps.
func (p *Profile) InDoubt() bool { return p.Others > busyHost }

// Split returns the split for so many ranks and a format, or nil. Without a format it is that of the profile's own.
func (p *Profile) Split(ranks int, state, moments string) *Split {
	state, moments = cmp.Or(state, p.State), cmp.Or(moments, p.Moments)
	for i, s := range p.Splits {
		if s.Ranks == ranks && s.State == state && s.Moments == moments {
			return &p.Splits[i]
		}
	}
	return nil
}

// Curve returns the curve for so many ranks on all NUMA nodes and a format, or nil.
func (p *Profile) Curve(ranks int, state, moments string) *Curve {
	for i, c := range p.Curves {
		if c.Ranks == ranks && c.NUMANode == AllNodes && c.State == state && c.Moments == moments {
			return &p.Curves[i]
		}
	}
	return nil
}

// RanksMeasured lists the numbers of ranks that the profile has splits for: "1, 2".
func (p *Profile) RanksMeasured() string {
	text := []string{}
	for _, s := range p.Splits {
		if n := fmt.Sprint(s.Ranks); !slices.Contains(text, n) {
			text = append(text, n)
		}
	}
	return strings.Join(text, ", ")
}

// TrainerCores returns the trainer's share for binding, in which shared is the share of cores that both use in turns.
func (s *Split) TrainerCores(shared binding.TrainerShare) binding.TrainerShare {
	if s.Shared {
		return shared
	}
	return binding.TrainerShare{Cores: s.Trainer}
}

func (s *Split) String() string {
	count := func(n int) string {
		if n == 1 {
			return "1 core"
		}
		return fmt.Sprintf("%d cores", n)
	}
	if s.Shared {
		return count(s.Optimizer) + " for trainer and optimizer in turns"
	}
	return fmt.Sprintf("%s for the trainer, %s for the optimizer", count(s.Trainer), count(s.Optimizer))
}

// validCPUs reports whether a text is a list of CPUs as the kernel writes it.
func validCPUs(list string) bool {
	set, err := cpuset.Parse(list)
	return err == nil && set.String() == list
}
