//go:build linux

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/safe"
)

// ListenForMetrics listens for Prometheus at an address. An address without a host
// means the loopback interface.
func ListenForMetrics(address string) (net.Listener, error) {
	name, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	return net.Listen("tcp", net.JoinHostPort(cmp.Or(name, loopback), port))
}

const loopback = "127.0.0.1"

// mostScrapes is how many connections of Prometheus are served at a time. Others wait.
const mostScrapes = 16

// ServeMetrics answers Prometheus at an address until stop is called. Limits keep
// clients from holding connections for long, or many at a time.
func (s *Server) ServeMetrics(address string) (stop func(), err error) {
	listener, err := ListenForMetrics(address)
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&collector{s})
	metrics := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	// A ServeMux would redirect paths such as /metrics/../x.
	only := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		metrics.ServeHTTP(w, r)
	})
	server := &http.Server{
		Handler: knownHosts(address, only), MaxHeaderBytes: 16 << 10,
		ReadTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second,
	}
	server.SetKeepAlivesEnabled(false) // one connection per scrape: none is idle
	go func() {
		err := server.Serve(netutil.LimitListener(listener, portion(mostScrapes)))
		if !errors.Is(err, http.ErrServerClosed) {
			s.logf("metrics: %v", err)
		}
	}()
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = server.Shutdown(ctx) // cuts off clients that still read
	}, nil
}

// knownHosts refuses requests for another host's name (DNS rebinding). A foreign page
// can make a browser on this host send requests under the page's own name, once that
// name resolves to this host. It cannot make the browser use an address, or a name of
// this host.
func knownHosts(address string, next http.Handler) http.Handler {
	given, _, _ := net.SplitHostPort(address) // ListenForMetrics has parsed it
	own, _ := os.Hostname()                   // "" if unknown
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.ToLower(hostOf(r.Host))
		short, _, _ := strings.Cut(name, ".")
		ownShort, _, _ := strings.Cut(strings.ToLower(own), ".")
		_, notAnAddress := netip.ParseAddr(name)
		known := []string{"", "localhost", strings.ToLower(given)}
		if notAnAddress != nil && !slices.Contains(known, name) && (short != ownShort || own == "") {
			message := fmt.Sprintf("the request is for the host %.100q: expected an address, localhost, %q, or the "+
				"name in --metrics",
				name, own)
			http.Error(w, message, http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// hostOf returns the host of a Host header, without its port.
func hostOf(header string) string {
	if name, _, err := net.SplitHostPort(header); err == nil {
		return name
	}
	return strings.Trim(header, "[]")
}

// collector takes an overview for each scrape. So nothing is counted twice, and steps
// do no extra work.
type collector struct{ server *Server }

func metric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("plimsoll_"+name, help, labels, nil)
}

var (
	infoMetric = metric("service_info", "The version of the service, the kernels in use and the job.", "version",
		"kernel", "job")
	restartsMetric   = metric("service_restarts_total", "How often the keeper has started the service again.")
	requestsMetric   = metric("requests_total", "Requests of clients.", "result")
	unansweredMetric = metric("requests_unanswered", "Requests in progress.")
	queuedMetric     = metric("requests_queued_bytes", "Bytes of received requests that the service has not read yet.")
	clientsMetric    = metric("clients", "Open connections.")
	asideMetric      = metric("sessions_set_aside", "Sessions of an earlier service that this one could not restore; "+
		"their memory is kept.")
	plannedMetric   = metric("planned_bytes", "Planned bytes.", "rank", "part", "component")
	residentMetric  = metric("resident_bytes", "Resident bytes.", "rank", "part", "component")
	stepMetric      = metric("step", "Number of the last finished step.", "rank", "part")
	stepsMetric     = metric("steps_total", "Steps finished by this service.", "rank", "part")
	secondsMetric   = metric("step_seconds_total", "Time of the steps of this service, in seconds.", "rank", "part")
	lastMetric      = metric("last_step_seconds", "Time of the last step, in seconds.", "rank", "part")
	bandwidthMetric = metric("last_step_bytes_per_second", "Memory bandwidth of the last step: bytes read and "+
		"written per second.",
		"rank", "part")
	trafficMetric = metric("step_bytes", "Bytes that a step reads and writes.", "rank", "part")
	tierMetric    = metric("tier_bytes", "Bytes of the files that hold the state.", "rank", "part")
	tierMoved     = metric("tier_moved_bytes_total", "Bytes that this service has read from the disks of a tier and "+
		"written there.", "rank", "part", "direction")
	attachedMetric = metric("session_attached", "1 while a client holds the session.", "rank", "part")
	savingMetric   = metric("session_saving", "1 while the service writes the state to a checkpoint.", "rank", "part")
	savedMetric    = metric("saved_step", "The step of the last checkpoint.", "rank", "part")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		infoMetric, restartsMetric, requestsMetric, unansweredMetric, queuedMetric, clientsMetric, asideMetric,
		plannedMetric, residentMetric, stepMetric, stepsMetric,
		secondsMetric, lastMetric, bandwidthMetric, trafficMetric, tierMetric, tierMoved,
		attachedMetric, savingMetric, savedMetric,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	o := c.server.Overview()
	send := func(d *prometheus.Desc, of prometheus.ValueType, value float64, labels []string) {
		for i, label := range labels {
			labels[i] = safe.Text(label) // names come from clients
		}
		out <- prometheus.MustNewConstMetric(d, of, value, labels...)
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		send(d, prometheus.GaugeValue, value, labels)
	}
	counter := func(d *prometheus.Desc, value float64, labels ...string) {
		send(d, prometheus.CounterValue, value, labels)
	}
	gauge(infoMetric, 1, o.Service, o.Kernel, o.Job)
	counter(restartsMetric, float64(o.Restarts))
	counter(requestsMetric, float64(o.Requests-o.Refused), "done")
	counter(requestsMetric, float64(o.Refused), "refused")
	gauge(unansweredMetric, float64(o.Unanswered))
	gauge(queuedMetric, float64(o.QueuedBytes))
	gauge(clientsMetric, float64(o.Clients))
	gauge(asideMetric, float64(len(o.SetAside)))
	for _, e := range o.Ledger {
		rank := strconv.Itoa(e.Rank)
		if e.Rank == ledger.WholeNode {
			rank = ""
		}
		gauge(plannedMetric, float64(e.Planned), rank, e.Part, string(e.Component))
		if e.Measured != nil {
			gauge(residentMetric, float64(*e.Measured), rank, e.Part, string(e.Component))
		}
	}
	for _, x := range o.Sessions {
		labels := []string{strconv.Itoa(x.Rank), x.Part}
		gauge(stepMetric, float64(x.Step), labels...)
		counter(stepsMetric, float64(x.StepsMade), labels...)
		counter(secondsMetric, x.StepSeconds, labels...)
		gauge(lastMetric, x.LastStepSeconds, labels...)
		gauge(bandwidthMetric, x.Bandwidth(), labels...)
		gauge(trafficMetric, float64(x.TrafficBytes), labels...)
		if t := x.Tier; t != nil {
			gauge(tierMetric, float64(t.Bytes), labels...)
			counter(tierMoved, float64(t.Read), labels[0], labels[1], "read")
			counter(tierMoved, float64(t.Written), labels[0], labels[1], "written")
		}
		gauge(attachedMetric, truth(x.Client != 0), labels...)
		gauge(savingMetric, truth(x.Saving), labels...)
		gauge(savedMetric, float64(x.SavedStep), labels...)
	}
}

func truth(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
