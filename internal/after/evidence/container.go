package evidence

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe/strict"
)

// containerPatterns are the outputs of kubectl describe and kubectl get.
var containerPatterns = []pattern{
	{ // kubectl: pkg/printers/internalversion/printers.go
		name:     "kubectl get pods",
		literals: []string{"OOMKilled", "Evicted", "Preempted", "DeadlineExceeded", "NodeLost", "NodeShutdown"},
		expression: `^\s*(?:\S+\s+){1,2}\d+/\d+\s+(?:Init:)?` +
			`(?P<status>OOMKilled|Evicted|Preempted|DeadlineExceeded|NodeLost|NodeShutdown)\s+\d+\s`,
		kind: Kubernetes,
		fact: func(m *match) Fact {
			if m.get("status") == "OOMKilled" {
				return BatchKill{By: "Kubernetes"}
			}
			return podEnd(m.get("status"), "")
		},
	},
	{ // kubectl: pkg/describe/describe.go
		name:       "kubectl describe: state",
		literals:   []string{"State:"},
		expression: `^\s*(?:Last )?State:\s+(?P<state>Terminated|Waiting|Running)$`,
		kind:       Kubernetes,
		take:       func(r *reader, m *match) { r.begin(m.stream, &describedState{}) },
	},
	{ // kubectl: pkg/describe/describe.go
		name:       "kubectl describe: limits",
		literals:   []string{"Limits:"},
		expression: `^\s+Limits:$`,
		kind:       Kubernetes,
		take:       func(r *reader, m *match) { r.begin(m.stream, &describedLimits{}) },
	},
	{ // kubectl: pkg/describe/describe.go
		name:       "kubectl describe: volume in memory",
		literals:   []string{"SizeLimit:"},
		expression: `^\s+SizeLimit:\s+(?P<size>\d\S*)$`,
		kind:       Kubernetes,
		take: func(r *reader, m *match) {
			before := r.before(&m.text)
			if before != nil && strings.Join(strings.Fields(before.string), " ") == "Medium: Memory" {
				r.emit(m, Limit{Name: "/dev/shm", Bytes: quantity(m.get("size"))})
			}
		},
	},
	{ // kubectl: pkg/describe/describe.go
		name:       "kubectl describe: status",
		literals:   []string{"Evicted", "Preempt", "DeadlineExceeded"},
		expression: `^\s*Reason:\s+(?P<reason>Evicted|Preempting|Preempted|DeadlineExceeded)$`,
		kind:       Kubernetes,
		fact:       func(m *match) Fact { return podEnd(m.get("reason"), "") },
	},
}

var describedRow = lazyregexp.New(`^\s+(Reason|Exit Code|Signal|Message|Started|Finished):\s+(.*)$`)

// describedState is the state of a container.
type describedState struct {
	at     text
	reason string
	code   string
}

func (b *describedState) line(_ *reader, t *text) bool {
	groups := describedRow.FindStringSubmatch(t.string)
	if groups == nil {
		return false
	}
	if b.at.number == 0 {
		b.at = *t
	}
	switch groups[1] {
	case "Reason":
		b.reason = groups[2]
	case "Exit Code":
		b.code = groups[2]
	}
	return true
}

func (b *describedState) end(r *reader) {
	c := container{reason: b.reason, code: b.code}
	for _, fact := range c.facts() {
		r.add(&b.at, fact)
	}
}

var describedLimit = lazyregexp.New(`^\s+([a-z][\w./-]*):\s+(\S+)$`)

// describedLimits are the limits of a container. Its requests, which follow, look the same.
type describedLimits struct{ over bool }

func (b *describedLimits) line(r *reader, t *text) bool {
	groups := describedLimit.FindStringSubmatch(t.string)
	b.over = b.over || groups == nil
	if b.over {
		return false
	}
	if groups[1] == "memory" {
		r.add(t, Limit{Name: "memory.max", Group: "the container", Bytes: quantity(groups[2])})
	}
	return true
}

func (*describedLimits) end(*reader) {}

// container is how a container has ended.
type container struct{ name, reason, code, signal string }

func (c container) facts() []Fact {
	var facts []Fact
	if c.reason == "OOMKilled" {
		facts = append(facts, BatchKill{By: "Kubernetes", What: c.name})
	}
	if c.code != "" {
		facts = append(facts, ProcessEnded{
			By: "Kubernetes", Rank: NoRank, LocalRank: NoRank, ExitCode: atoi(c.code), Signal: atoi(c.signal),
		})
	}
	return facts
}

// usedBy is the kubelet's word on what a container held when its node was low on memory.
var usedBy = lazyregexp.New(`Container (\S+) was using (\d+[KMGTP]?i?)`)

// podEnds returns the end of a pod that Kubernetes wanted, with what its containers held, or nothing.
func podEnds(reason, message string) []Fact {
	end := podEnd(reason, message)
	if end == nil {
		return nil
	}
	list := MemoryList{By: "the kubelet"}
	if low := lowOn.FindStringSubmatch(message); low != nil && strings.EqualFold(low[1]+low[2], "memory") {
		for _, groups := range usedBy.FindAllStringSubmatch(message, mostListed) {
			list.Holders = append(list.Holders, MemoryHolder{Name: "container " + groups[1],
				Bytes: quantity(groups[2]).Bytes})
		}
	}
	if list.Holders == nil {
		return []Fact{end}
	}
	return []Fact{end, list}
}

// podEnd returns the end of a pod that Kubernetes wanted, or nil.
func podEnd(reason, message string) Fact {
	switch reason {
	case "Evicted":
		return BatchEnd{By: "Kubernetes", Reason: "evicted" + eviction(message)}
	case "Preempting", "Preempted", "PreemptionByScheduler":
		return BatchEnd{By: "Kubernetes", Reason: "preempted"}
	case "DeadlineExceeded":
		return BatchEnd{By: "Kubernetes", Reason: "time limit"}
	case "NodeLost", "NodeShutdown", "Shutdown", "Terminated":
		return BatchEnd{By: "Kubernetes", Reason: "node failure"}
	}
	return nil
}

var (
	lowOn      = lazyregexp.New(`low on resource: ([\w-]+)|had condition: \[([A-Za-z]+)Pressure\b`)
	fullVolume = lazyregexp.New(`(?i)emptyDir volume "([^"]+)" exceeds the limit "([^"]+)"`)
)

// eviction says why the kubelet evicted a pod, after a colon, or is empty.
func eviction(message string) string {
	if low := lowOn.FindStringSubmatch(message); low != nil {
		return ": the node was low on " + low[1] + strings.ToLower(low[2])
	}
	if volume := fullVolume.FindStringSubmatch(message); volume != nil {
		return fmt.Sprintf(": the volume %s reached its limit of %v", volume[1], quantity(volume[2]).Bytes)
	}
	if strings.Contains(message, "ephemeral") || strings.Contains(message, "mptyDir") {
		return ": ephemeral storage"
	}
	return strings.TrimRight(sentence("", message), ". ")
}

// readKubernetes reads pods and events from kubectl get, in JSON or YAML.
func readKubernetes(r *reader, d *document) {
	items := d.Root.Find("items")
	if items == nil {
		items = d.Root
	}
	each(items, func(item *strict.Value) {
		switch textAt(item, "kind") {
		case "Event":
			readEvent(r, d, item)
		default:
			readPod(r, d, item)
		}
	})
}

func readEvent(r *reader, d *document, event *strict.Value) {
	at := event.Find("reason")
	if at == nil {
		return
	}
	switch message := textAt(event, "message"); at.Text {
	case "OOMKilling", "SystemOOM", "TaskOOM":
		d.add(r, at, BatchKill{By: "Kubernetes", What: textAt(event, "involvedObject.name")})
	default:
		for _, fact := range podEnds(at.Text, message) {
			d.add(r, at, fact)
		}
	}
}

func readPod(r *reader, d *document, pod *strict.Value) {
	if at := pod.Find("status.reason"); at != nil {
		facts := podEnds(at.Text, textAt(pod, "status.message"))
		if message := pod.Find("status.message"); message != nil && (at.Text == "Evicted" || at.Text == "Terminated") {
			at = message // it says why
		}
		for _, fact := range facts {
			d.add(r, at, fact)
		}
	}
	each(pod.Find("status.conditions"), func(condition *strict.Value) {
		if at := condition.Find("message"); at != nil && textAt(condition, "status") == "True" {
			for _, fact := range podEnds(textAt(condition, "reason"), at.Text) {
				d.add(r, at, fact)
			}
		}
	})
	limits := map[string]Size{}
	each(pod.Find("spec.containers"), func(c *strict.Value) {
		if v := c.Find("resources.limits.memory"); v != nil {
			name := textAt(c, "name")
			limits[name] = quantity(v.Text)
			d.add(r, v, Limit{Name: "memory.max", Group: "container " + name, Bytes: limits[name]})
		}
	})
	each(pod.Find("spec.volumes"), func(volume *strict.Value) {
		if v := volume.Find("emptyDir.sizeLimit"); v != nil && textAt(volume, "emptyDir.medium") == "Memory" {
			d.add(r, v, Limit{Name: "/dev/shm", Bytes: quantity(v.Text)})
		}
	})
	for _, list := range []string{"status.initContainerStatuses", "status.containerStatuses"} {
		each(pod.Find(list), func(status *strict.Value) {
			readEndOf(r, d, status, limits)
		})
	}
}

// readContainerStatuses reads the containerStatuses of a pod, without the pod.
func readContainerStatuses(r *reader, d *document) {
	each(d.Root, func(status *strict.Value) { readEndOf(r, d, status, nil) })
}

func readEndOf(r *reader, d *document, status *strict.Value, limits map[string]Size) {
	for _, state := range []string{"lastState.terminated", "state.terminated"} {
		readTerminated(r, d, status, status.Find(state), limits)
	}
}

func readTerminated(r *reader, d *document, status, state *strict.Value, limits map[string]Size) {
	if state == nil {
		return
	}
	c := container{
		name: textAt(status, "name"), reason: textAt(state, "reason"), code: textAt(state, "exitCode"),
		signal: textAt(state, "signal"),
	}
	at := state
	for _, name := range []string{"exitCode", "reason"} {
		if v := state.Find(name); v != nil {
			at = v
		}
	}
	for _, fact := range c.facts() {
		if kill, ok := fact.(BatchKill); ok {
			kill.What, kill.Limit = "container "+c.name, limits[c.name]
			fact = kill
		}
		d.add(r, at, fact)
	}
}

// quantity reads a quantity of Kubernetes: Gi is binary, G is decimal.
func quantity(s string) Size {
	units := map[string]float64{
		"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 1 << 10, "Mi": 1 << 20,
		"Gi": 1 << 30,
		"Ti": 1 << 40, "Pi": 1 << 50,
	}
	number := strings.TrimRight(s, "mkMGTPKi")
	value, err := strconv.ParseFloat(number, 64)
	unit, known := units[s[len(number):]]
	if bytes := value * unit; err == nil && known && bytes >= 0 && bytes < noSize {
		return Size{Bytes: ledger.Bytes(bytes), Known: true}
	}
	return Size{}
}

// readDocker reads docker inspect of containers.
func readDocker(r *reader, d *document) {
	each(d.Root, func(c *strict.Value) {
		name := strings.TrimPrefix(textAt(c, "Name"), "/")
		limit := sizeAt(c, "HostConfig.Memory", 1)
		limit.Known = limit.Bytes > 0 // 0 is none
		if limit.Known {
			d.add(r, c.Find("HostConfig.Memory"), Limit{Name: "memory.max", Group: "container " + name, Bytes: limit})
		}
		if v := c.Find("HostConfig.ShmSize"); v != nil {
			d.add(r, v, Limit{Name: "/dev/shm", Group: "container " + name, Bytes: sizeOf(v.Text, 1)})
		}
		each(c.Find("HostConfig.Ulimits"), func(u *strict.Value) {
			if textAt(u, "Name") == "memlock" {
				d.add(r, u, Limit{Name: "RLIMIT_MEMLOCK", Group: "container " + name, Bytes: sizeAt(u, "Soft", 1)})
			}
		})
		if v := c.Find("State.OOMKilled"); v != nil && v.Kind == 't' {
			d.add(r, v, BatchKill{By: "Docker", What: "container " + name, Limit: limit})
		}
		if v := c.Find("State.ExitCode"); v != nil && textAt(c, "State.Status") != "running" {
			d.add(r, v, ProcessEnded{By: "Docker", Rank: NoRank, LocalRank: NoRank, ExitCode: atoi(v.Text)})
		}
	})
}

// readSlurm reads sacct --json and scontrol show job --json.
func readSlurm(r *reader, d *document) {
	each(d.Root.Find("jobs"), func(job *strict.Value) {
		readAccount(r, d, job, textAt(job, "job_id"))
		each(job.Find("steps"), func(step *strict.Value) {
			readAccount(r, d, step, textAt(step, "step.id"))
		})
	})
}

func readAccount(r *reader, d *document, v *strict.Value, name string) {
	a := account{job: name}
	at := v
	for _, path := range []string{"state.current", "job_state", "state"} {
		if state := v.Find(path); state != nil && a.state == "" {
			each(state, func(s *strict.Value) {
				if a.state == "" && s.Text != "" {
					a.state, at = s.Text, s
				}
			})
		}
	}
	if code := v.Find("exit_code"); code != nil {
		number := textAt(code, "return_code.number") + textAt(code, "return_code")
		a.exit = number + ":" + textAt(code, "signal.id.number") + textAt(code, "signal.signal_id")
		if number == "" {
			a.exit = ""
		}
	}
	each(v.Find("tres.requested.max"), func(t *strict.Value) { a.highest = memoryOf(t, a.highest) })
	each(v.Find("tres.requested"), func(t *strict.Value) { a.requested = memoryOf(t, a.requested) })
	each(v.Find("tres.allocated"), func(t *strict.Value) { a.requested = memoryOf(t, a.requested) })
	for _, fact := range a.facts() {
		d.add(r, at, fact)
	}
}

// memoryOf returns the memory of an entry of Slurm's trackable resources: for a job in MiB, for the peak of a step in
// bytes.
func memoryOf(t *strict.Value, otherwise Size) Size {
	if textAt(t, "type") != "mem" {
		return otherwise
	}
	if t.Find("task") != nil {
		return sizeAt(t, "count", 1)
	}
	return sizeAt(t, "count", ledger.MiB)
}
