//go:build linux

package service

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/state/service/protocol"
)

// TestLedger compares every arena of a session with its plan, and all memory of trainer
// and service with the sum of the arenas. A page that both have mapped counts once, and
// nothing else is as large as the model.
func TestLedger(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*protocol.Document)
		bytes  float64 // per parameter
	}{
		{"split", func(*protocol.Document) {}, 14},
		{"split, bf16 moments", func(d *protocol.Document) { d.Moments = "bf16" }, 10},
		{"split, int8 moments", func(d *protocol.Document) { d.Moments = "int8" }, 8.03},
		{"fp32 state and gradients", func(d *protocol.Document) { d.State, d.Gradient = "fp32", "fp32" }, 18},
	} {
		t.Run(c.name, func(t *testing.T) {
			if testing.Short() && c.bytes != 14 {
				t.Skip("with -short one format will do")
			}
			r := startService(t)
			own := beside(t, "self")
			s := mustOpen(t, r.Socket, testDocument(of(16<<20), c.change))
			putGradients(s, 1, 0, s.Welcome.Elements)
			if err := s.Step(1, 1, true, adamw[0]); err != nil {
				t.Fatal(err)
			}
			o := r.overview(t)
			var planned, journal ledger.Bytes
			for _, e := range o.Ledger {
				if e.Rank == ledger.WholeNode {
					continue
				}
				planned += e.Planned
				if e.Component == ledger.StepJournal {
					journal = e.Planned
				}
				if e.Measured == nil || *e.Measured != e.Planned {
					t.Errorf("%s: %v are resident, and %d B are planned", e.Component, e.Measured, e.Planned)
				}
				if e.Why == "" {
					t.Errorf("%s has no reason", e.Component)
				}
			}
			// Beyond this size the journal does not grow with the model, so it has a
			// bound of its own.
			each := float64(planned-journal) / float64(s.Welcome.Elements)
			if each < c.bytes*0.995 || each > c.bytes*1.005 {
				t.Errorf("%.4f bytes for each parameter: expected %g within 0.5 %%", each, c.bytes)
			}
			if journal <= 0 || journal > 2*ledger.MiB {
				t.Errorf("the journal takes %v", journal)
			}
			both := shared(t, "self") + shared(t, strconv.Itoa(o.Process))
			if off := both - planned; off < -64*ledger.KiB || off > 64*ledger.KiB {
				t.Errorf("trainer and service have %v of shared memory, and the arenas are %v", both, planned)
			}
			if process := beside(t, strconv.Itoa(o.Process)); process > 40*ledger.MiB {
				t.Errorf("the service holds %v beside the arenas", process)
			}
			process, tables := measuredBytes(t, o, ledger.ServiceProcess), measuredBytes(t, o, ledger.ServicePageTables)
			if process < ledger.MiB || process > 80*ledger.MiB { // with its text, which others map, too
				t.Errorf("the service says that it holds %v beside the arenas", process)
			}
			const entry, page = 8, 4 * ledger.KiB
			if onHugePages(t, o.Process) == 0 && (tables < planned/page*entry ||
				tables > planned/page*entry+4*ledger.MiB) {
				t.Errorf("page tables of %v for arenas of %v", tables, planned)
			}
			if more := beside(t, "self") - own; more > 8*ledger.MiB {
				t.Errorf("the trainer holds %v more than before it had the session", more)
			}
			t.Logf("%.4f bytes for each parameter, and a journal of %v", each, journal)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// measuredBytes returns the service's own measurement of a component.
func measuredBytes(t *testing.T, o *protocol.Overview, component ledger.Component) ledger.Bytes {
	t.Helper()
	for _, e := range o.Ledger {
		if e.Component == component && e.Measured != nil {
			return *e.Measured
		}
	}
	t.Errorf("%s is not in the ledger", component)
	return 0
}

func onHugePages(t *testing.T, process int) ledger.Bytes {
	var huge ledger.Bytes
	for _, m := range memory(t, strconv.Itoa(process)).Mappings {
		huge += m.Huge
	}
	return huge
}

func memory(t *testing.T, process string) probe.Memory {
	t.Helper()
	m, err := probe.Process(os.DirFS("/"), process)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// arenaMapping begins the names of arenas in /proc.
const arenaMapping = "/memfd:" + arena.NamePrefix

// shared returns a process's share of the arenas; beside returns its other memory.
func shared(t *testing.T, process string) ledger.Bytes {
	return memory(t, process).Proportional(func(name string) bool { return strings.HasPrefix(name, arenaMapping) })
}

func beside(t *testing.T, process string) ledger.Bytes {
	return memory(t, process).Proportional(func(name string) bool { return !strings.HasPrefix(name, arenaMapping) })
}

// serveHere returns a service in this process, and the path of its socket.
func serveHere(t testing.TB) (*Server, string) {
	t.Helper()
	server, socket, _ := serveUntil(t)
	return server, socket
}

// serveUntil is serveHere with a function that ends the service before the end of the test.
func serveUntil(t testing.TB) (server *Server, socket string, end func()) {
	t.Helper()
	directory, err := os.MkdirTemp("", "plimsoll-test-")
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(directory, "socket")
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	given := &Inherited{Listener: protocol.SocketListener{UnixListener: listener}}
	server, err = NewServer("test", given, testHost, allForUpdates, Tier{}, t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(directory); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return server, socket, end
}

// servingMetrics has a service answer Prometheus. It returns the address, and what ends it.
func servingMetrics(t *testing.T, server *Server) (address string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address = listener.Addr().String() // closed below, and free then
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	stop, err = server.ServeMetrics(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return address, stop
}

// scraped returns the metrics that a service answers, by their names and labels.
func scraped(t *testing.T, address string) map[string]float64 {
	t.Helper()
	response, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for name, family := range families {
		if family.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		for _, m := range family.Metric {
			got[name+labelsOf(m)] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return got
}

// TestMetricsOfATier: what a service has moved to and from the disks, of which they wear, and how much they hold.
func TestMetricsOfATier(t *testing.T) {
	server, socket := serveHere(t)
	server.tier = Tier{Folders: []string{t.TempDir()}, Memory: 32 * ledger.MiB}
	address, _ := servingMetrics(t, server)
	s := begun(t, socket, testDocument(small))
	mustStep(t, s, 2)
	got, status := scraped(t, address), server.Overview().Sessions[0].Tier
	for name, want := range map[string]float64{
		"plimsoll_tier_bytes{part=bf16,rank=0}":                               float64(status.Bytes),
		"plimsoll_tier_moved_bytes_total{direction=read,part=bf16,rank=0}":    float64(status.Read),
		"plimsoll_tier_moved_bytes_total{direction=written,part=bf16,rank=0}": float64(status.Written),
	} {
		if x, ok := got[name]; !ok || x != want || want == 0 {
			t.Errorf("%s is %v (there: %v), and the overview says %v", name, x, ok, want)
		}
	}
}

// TestMetrics compares the metrics that Prometheus reads with the overview.
func TestMetrics(t *testing.T) {
	server, socket := serveHere(t)
	address, stop := servingMetrics(t, server)
	a := begun(t, socket, testDocument(small, func(d *protocol.Document) { d.World = 2 }))
	mustStep(t, a, 3)
	b := begun(t, socket, testDocument(small, func(d *protocol.Document) { d.World, d.Rank, d.Moments = 2, 1, "int8" }))
	mustStep(t, b, 2)
	if _, err := b.Save(t.TempDir(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Saved(); err != nil {
		t.Fatal(err)
	}
	wantError(t, b.Step(9, 1, true, adamw...), protocol.OutOfOrder, "*")
	if err := a.Detach(); err != nil {
		t.Fatal(err)
	}
	await(t, "a client to go", func() bool { return server.Overview().Clients == 1 })
	await(t, "the end of an answer that was heard", func() bool { return server.Overview().Unanswered == 0 })

	got := scraped(t, address)
	o := server.Overview()
	want := map[string]float64{
		fmt.Sprintf("plimsoll_service_info{job=test,kernel=%s,version=test}", o.Kernel): 1,
		"plimsoll_service_restarts_total{}":                                             0,

		"plimsoll_requests_total{result=done}":                  float64(o.Requests - o.Refused),
		"plimsoll_requests_total{result=refused}":               1,
		"plimsoll_requests_unanswered{}":                        0,
		"plimsoll_requests_queued_bytes{}":                      0,
		"plimsoll_clients{}":                                    1,
		"plimsoll_step{part=bf16,rank=0}":                       3,
		"plimsoll_step{part=bf16,rank=1}":                       2,
		"plimsoll_steps_total{part=bf16,rank=0}":                3,
		"plimsoll_session_attached{part=bf16,rank=0}":           0,
		"plimsoll_session_attached{part=bf16,rank=1}":           1,
		"plimsoll_saved_step{part=bf16,rank=0}":                 0,
		"plimsoll_saved_step{part=bf16,rank=1}":                 2,
		"plimsoll_session_saving{part=bf16,rank=1}":             0,
		"plimsoll_step_bytes{part=bf16,rank=1}":                 float64(o.Sessions[1].TrafficBytes),
		"plimsoll_last_step_seconds{part=bf16,rank=0}":          o.Sessions[0].LastStepSeconds,
		"plimsoll_step_seconds_total{part=bf16,rank=0}":         o.Sessions[0].StepSeconds,
		"plimsoll_last_step_bytes_per_second{part=bf16,rank=0}": o.Sessions[0].Bandwidth(),
	}
	arenas := 0
	for _, e := range o.Ledger {
		if e.Rank == ledger.WholeNode {
			continue // the process's own memory changes
		}
		arenas++
		labels := fmt.Sprintf("{component=%s,part=%s,rank=%d}", e.Component, e.Part, e.Rank)
		want["plimsoll_planned_bytes"+labels] = float64(e.Planned)
		want["plimsoll_resident_bytes"+labels] = float64(*e.Measured)
	}
	if arenas < 15 {
		t.Errorf("only %d arenas in the ledger", arenas)
	}
	for name, value := range want {
		if x, ok := got[name]; !ok || x != value {
			t.Errorf("%s is %v (there: %v), and the overview says %v", name, x, ok, value)
		}
	}
	if got["plimsoll_resident_bytes{component="+string(ledger.ServiceProcess)+",part=,rank=}"] < float64(ledger.MiB) {
		t.Error("the process itself is not there")
	}
	stop()
	if _, err := http.Get("http://" + address + "/metrics"); err == nil {
		t.Error("metrics are answered after the end")
	}
}

// TestOverviewWhileTheServiceEnds asks for the overview while the service ends, as
// Prometheus may. Some sessions still wait for their checkpoints; others are closed
// already.
func TestOverviewWhileTheServiceEnds(t *testing.T) {
	server, socket := serveHere(t)
	for rank := range 4 {
		s := begun(t, socket, testDocument(small, func(d *protocol.Document) { d.Rank, d.World = rank, 4 }))
		if _, err := s.Save(t.TempDir(), nil); err != nil {
			t.Fatal(err)
		}
		if err := s.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	var asking sync.WaitGroup
	asking.Go(func() {
		for len(server.Overview().Sessions) > 0 {
		}
	})
	if err := server.end(); err != nil {
		t.Fatal(err)
	}
	asking.Wait()
}

func labelsOf(m *dto.Metric) string {
	var labels []string
	for _, l := range m.Label {
		labels = append(labels, l.GetName()+"="+l.GetValue())
	}
	return "{" + strings.Join(labels, ",") + "}"
}
